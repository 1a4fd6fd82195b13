"""The trained stages of a run as one surrogate, loaded by their receipts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ups.files import place_of
from ups.models.codec import codec_from
from ups.models.denoiser import Denoiser
from ups.models.operator import Operator, SteadyModel
from ups.models.weights import from_settings, load_model
from ups.surrogate.surrogate import Correction, Surrogate

if TYPE_CHECKING:
    from ups.data.latent_cache import LatentCache  # imports pydantic, which a bundle does without

OFF = "off"  # the mode of a method that samples no residuals for a family
PLAIN_STAGES = ("codec", "operator", "steady")  # all that a prediction without corrector needs
MODELS = {
    "codec": codec_from,
    "operator": from_settings(Operator),
    "diffusion": from_settings(Denoiser),
    "consistency": from_settings(Denoiser),
    "steady": from_settings(SteadyModel),
}


@dataclass(frozen=True)
class Trained:
    """Receipts of a run: its latent cache, and its stages by name, without those that had no data to train on.

    Paths in receipts are relative to `data_root`. The stage `corrector`, if there is one, holds the corrections that
    `choose_corrector` selected; without it no residuals are sampled.
    """

    latent_cache: dict[str, Any]
    stages: dict[str, dict[str, Any]]
    data_root: Path

    @property
    def digests(self) -> dict[str, str]:
        """What identifies the weights of each stage, the latents and the choice of the corrector."""
        return stage_digests(self.stages | {"latent_cache": self.latent_cache})

    def cache(self) -> "LatentCache":
        """The latents on which the stages were trained."""
        from ups.data.latent_cache import LatentCache

        return LatentCache.open(place_of(self.data_root, self.latent_cache), self.latent_cache["key"])

    def surrogate(self, device: str | torch.device) -> Surrogate:
        """All trained models on `device`; None where the run has no such stage."""
        from ups.data.latent_shards import scale_of  # imports google_crc32c

        models: dict[str, nn.Module] = {
            stage: load_model(make, self.data_root, self.stages[stage]).to(device)
            for stage, make in MODELS.items()
            if stage in self.stages
        }
        chosen = corrections(self.stages["corrector"]) if "corrector" in self.stages else {}
        tolerances = self.latent_cache["key"]["options"]["tolerance"].items()
        scales = {family: scale for family, each in tolerances if (scale := scale_of(each)) is not None}
        return replace(surrogate_of(models, chosen), latent_scales=scales)


def stage_digests(receipts: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The hash of the weights of each trained stage, the fingerprint of other steps."""
    return {name: receipt.get("weights", receipt.get("fingerprint")) for name, receipt in receipts.items()}


def surrogate_of(models: dict[str, nn.Module], chosen: dict[tuple[str, str], Correction]) -> Surrogate:
    """The surrogate of models by stage, of which only the codec must be there."""
    return Surrogate(
        codec=models["codec"],
        operator=models.get("operator"),
        denoiser=models.get("diffusion"),
        student=models.get("consistency"),
        steady=models.get("steady"),
        corrections=chosen,
    )


def corrections(corrector: dict[str, Any]) -> dict[tuple[str, str], Correction]:
    """Corrections by (method, family) from the receipt of `choose_corrector`; no entry where a method is off."""
    return {
        (method, family): Correction(**how)
        for family, methods in corrector["families"].items()
        for method, how in methods.items()
        if how["mode"] != OFF
    }
