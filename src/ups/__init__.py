"""Universal Physics Stack: one latent neural surrogate for all PDEBench families, from raw files to a verdict.

model = ups.load("data")
u = model.predict("burgers_1d", u_0, steps=20, nu=0.01)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ups.surrogate.model import Ensemble, Model, load

__version__ = "0.1.0"
__all__ = ["Ensemble", "Model", "load"]

_PLACES = {"Ensemble": "ups.surrogate.model", "Model": "ups.surrogate.model", "load": "ups.surrogate.model"}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: `import ups` alone does not load torch."""
    if name not in _PLACES:
        raise AttributeError(f"module 'ups' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
