"""Universal Physics Stack: one latent neural surrogate for all PDEBench families, from raw files to judged numbers."""

__version__ = "0.1.0"
