"""Errors in physical units, over streams of batches (B, T, C, *grid) that need not fit into memory."""

from ups.metrics.compat import CompatSuite
from ups.metrics.errors import EPS, L2RE, RMSE, VRMSE, bRMSE, nRMSE
from ups.metrics.pdebench import MetricSuite, snapshot_errors
from ups.metrics.spectra import radial_spectrum

__all__ = [
    "EPS",
    "L2RE",
    "RMSE",
    "VRMSE",
    "CompatSuite",
    "MetricSuite",
    "bRMSE",
    "nRMSE",
    "radial_spectrum",
    "snapshot_errors",
]
