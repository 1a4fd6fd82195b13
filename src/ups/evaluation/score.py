"""Put the trained models of a run together and score them."""

from pathlib import Path
from typing import Any

import torch

from ups.config import EvaluationConfig
from ups.data.latent_cache import LatentCache
from ups.emulator import Emulator
from ups.evaluation.evaluate import evaluate
from ups.models.codec import codec_from
from ups.models.denoiser import Denoiser
from ups.models.operator import Operator
from ups.models.steady import SteadyModel
from ups.models.weights import load_model
from ups.progress import ProgressBar

MODELS = {
    "codec": codec_from,
    "operator": Operator,
    "diffusion": Denoiser,
    "consistency": Denoiser,
    "steady": SteadyModel,
}


def score(
    folder: Path,
    latent_cache: dict[str, Any],
    stages: dict[str, dict[str, Any]],
    config: EvaluationConfig,
    device: str,
    raw: Path,
    data_root: Path,
) -> dict[str, Any]:
    """Evaluate what was trained; arrays for the figures go into `folder`, records are returned."""
    cache = LatentCache.open(data_root / latent_cache["path"], latent_cache["key"])
    models = {
        stage: None if "untrained" in receipt else load_model(MODELS[stage], data_root, receipt).to(device)
        for stage, receipt in stages.items()
    }
    emulator = Emulator(
        codec=models["codec"],
        operator=models["operator"],
        denoiser=models["diffusion"],
        student=models["consistency"],
        steady=models["steady"],
        sigma_range=(config.sigma_min, config.sigma_max),
    )
    total = sum(len(entry["split"]["test"]) for entry in cache.datasets.values())
    with ProgressBar("evaluate", total, "trajectories") as bar:
        records = evaluate(emulator, cache, raw, config, torch.device(device), folder, bar.advance)
    families = {name: entry["dataset"]["family"] for name, entry in sorted(cache.datasets.items())}
    return {"records": records, "datasets": families}
