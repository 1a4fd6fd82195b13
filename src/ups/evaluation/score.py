"""Put the trained models of a run together and score them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ups.config import EvaluationConfig
from ups.data.latent_cache import LatentCache
from ups.emulator import Correction, Emulator
from ups.evaluation import OFF
from ups.evaluation.evaluate import Subject, evaluate, held_out
from ups.models.codec import codec_from
from ups.models.denoiser import Denoiser
from ups.models.operator import Operator
from ups.models.sizes import from_settings
from ups.models.steady import SteadyModel
from ups.models.weights import load_model
from ups.progress import ProgressBar

MODELS = {
    "codec": codec_from,
    "operator": from_settings(Operator),
    "diffusion": from_settings(Denoiser),
    "consistency": from_settings(Denoiser),
    "steady": from_settings(SteadyModel),
}


@dataclass(frozen=True)
class Trained:
    """Receipts of what a run has trained: latent cache and stages that had data, with files below `data_root`.

    Among the stages may be `corrector`, what `choose_corrector` decided; without it no residuals are drawn.
    """

    latent_cache: dict[str, Any]
    stages: dict[str, dict[str, Any]]
    data_root: Path

    def cache(self) -> LatentCache:
        """The latents that the stages learned on."""
        return LatentCache.open(self.data_root / self.latent_cache["path"], self.latent_cache["key"])

    def emulator(self, device: str) -> Emulator:
        """The models of the stages put together; those that are not among them are None."""
        models = {
            stage: load_model(make, self.data_root, self.stages[stage]).to(device)
            for stage, make in MODELS.items()
            if stage in self.stages
        }
        return Emulator(
            codec=models["codec"],
            operator=models.get("operator"),
            denoiser=models.get("diffusion"),
            student=models.get("consistency"),
            steady=models.get("steady"),
            corrections=corrections(self.stages["corrector"]) if "corrector" in self.stages else {},
        )


def score(folder: Path, trained: Trained, config: EvaluationConfig, device: str, raw: Path) -> dict[str, Any]:
    """Evaluate what was trained on the test split; arrays for the figures go into `folder`, records are returned."""
    subjects = held_out(trained.cache(), raw, "test")
    return {
        "records": score_subjects(folder, trained.emulator(device), subjects, config, device),
        "datasets": {subject.dataset.name: subject.dataset.family for subject in subjects},
    }


def score_subjects(
    folder: Path, emulator: Emulator, subjects: list[Subject], config: EvaluationConfig, device: str
) -> list[dict[str, Any]]:
    """Records of every subject, with a bar meanwhile."""
    total = sum(len(subject.trajectories) for subject in subjects)
    with ProgressBar("evaluate", total, "trajectories") as bar:
        return evaluate(emulator, subjects, config, torch.device(device), folder, bar.advance)


def corrections(corrector: dict[str, Any]) -> dict[tuple[str, str], Correction]:
    """What was decided, by method and family; where a method is off there is nothing."""
    return {
        (method, family): Correction(**how)
        for family, methods in corrector["families"].items()
        for method, how in methods.items()
        if how["mode"] != OFF
    }
