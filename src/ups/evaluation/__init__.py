"""Evaluation of the trained models: predictions, metrics in physical units, verdicts, comparisons and reports.

- `predictions`: one step and rollouts of every method for a batch of trajectories
- `scores`, `records`: metrics of every method over sets of trajectories, as they stand in `metrics.json`
- `parts`: the scoring in parts, which processes share and an interruption keeps
- `kept`, `examples`: rollouts kept on disk; arrays for figures
- `external`: scores of other files and other models: PDEBench files of a folder, baselines
- `adaptation`: networks that learned from a few trajectories, and their learning curves
- `gates`: pass or fail, from the metrics alone; whether a model is better than the registered champion
- `entries`, `leaderboard`: errors with the trajectories they belong to, of runs and of other models; their ranks
- `corrector`, `choice`: choice among ways to sample residuals, by their scores on validation trajectories; the families
  are shared by processes
- `comparison`, `costs`: errors beside those of the baselines; seconds per training, milliseconds per snapshot
- `coverage`, `shifts`: what the training split covers, and whether being outside foretells errors
- `studies`: tables of the ablation and of several seeds
- `violations`: violations of physics by predictions, and a score fitted on them
- `search`, `selection`, `selected`: choice among ensemble members by that score, its cost, whether it lowers the error,
  and where it does the method `selected`
- `figures`, `styles`, `tables`: plots and their style, Markdown and console tables
- `report`, `report_tables`: one HTML page with all tables, figures and animations of a run
"""
