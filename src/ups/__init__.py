"""Universal Physics Stack: one latent neural surrogate for all PDEBench families, from raw files to a verdict.

    model = ups.load("data")
    u = model.predict("burgers_1d", u_0, steps=20, nu=0.01)

`Family` and `write_dataset` are for equations and data of one's own. All names are imported at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ups.data.families import Family
    from ups.data.own import write_dataset
    from ups.surrogate.model import Ensemble, Model, load

__version__ = "0.1.0"
__all__ = ["Ensemble", "Family", "Model", "load", "write_dataset"]

PLACES = {
    "Ensemble": "ups.surrogate.model",
    "Family": "ups.data.families",
    "Model": "ups.surrogate.model",
    "load": "ups.surrogate.model",
    "write_dataset": "ups.data.own",
}


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module 'ups' has no attribute {name!r}")
    return getattr(import_module(PLACES[name]), name)
