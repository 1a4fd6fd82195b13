"""Universal Physics Stack: one latent neural surrogate for all PDEBench families, from raw files to a verdict.

`Family` and `write_dataset` are for equations and data of one's own; they are imported at their first use.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["Family", "write_dataset"]

PLACES = {"Family": "ups.data.families", "write_dataset": "ups.data.own"}


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module 'ups' has no attribute {name!r}")
    return getattr(import_module(PLACES[name]), name)
