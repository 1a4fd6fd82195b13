"""Universal Physics Stack: one latent neural surrogate for all PDEBench families, from raw files to a verdict.

    model = ups.load("data")
    u = model.predict("burgers_1d", u_0, steps=20, nu=0.01)

`Family` and `write_dataset` are for equations and data of one's own. All names are imported at their first use.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ups.data.families import Family
    from ups.data.own import write_dataset
    from ups.surrogate.model import Ensemble, Model

__version__ = "0.1.0"
__all__ = ["Ensemble", "Family", "Model", "load", "write_dataset"]

PLACES = {
    "Ensemble": "ups.surrogate.model",
    "Family": "ups.data.families",
    "Model": "ups.surrogate.model",
    "write_dataset": "ups.data.own",
}


def load(place: str | Path, *, device: "str | torch.device | None" = None) -> "Model":
    """Trained models from a data root, a bundle folder or MLflow (`models:/ups@champion`).

    Args:
        place: see above; the MLflow store is MLFLOW_TRACKING_URI, by default that of the data root `data`.
        device: where the models run; None: a GPU if there is one.

    Raises:
        ConfigFault: there is no such device or MLflow store.
        DataFault: there are no trained models, or a file is damaged.
    """
    from ups.surrogate import model

    if not str(place).startswith("models:/"):
        return model.load(place, device=device)
    try:
        from ups.runs.registry import bundle_of
    except ModuleNotFoundError as error:
        from ups.errors import ConfigFault

        raise ConfigFault(f"{place} needs {error.name}: install ups with its dependencies") from None
    with bundle_of(str(place)) as bundle:
        return model.load(bundle, device=device)


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module 'ups' has no attribute {name!r}")
    return getattr(import_module(PLACES[name]), name)
