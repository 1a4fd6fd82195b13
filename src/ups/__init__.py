"""Universal Physics Stack: one latent neural surrogate for all PDEBench families, from raw files to a verdict."""

__version__ = "0.1.0"
