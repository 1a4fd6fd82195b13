"""PDEBench files: registry, sources, trajectories, splits, statistics and the latent cache."""
