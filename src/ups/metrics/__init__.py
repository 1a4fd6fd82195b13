"""Metrics: plain functions and running sums over tensors, without models, files or configuration.

- `errors`: nRMSE, MAE, VRMSE, L2RE, correlation time, conservation drift; running means over samples
- `spectra`: energy per radial wavenumber, PDEBench's corner of the spectrum, scores per band of wavenumbers
- `pdebench`: PDEBench's eight metrics, averaged over samples, or over batches as in its papers
- `ensembles`: CRPS, spread-skill ratio, coverage and rank histogram of an ensemble
- `bootstrap`: confidence intervals over trajectories
- `suite`: all of these for one method and horizon, over a stream of batches
"""
