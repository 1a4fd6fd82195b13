"""What the trained models of a run miss: the operator in a step, the steady model in a solution."""

import torch
from torch import Tensor

from ups.data.latent_cache import LatentCache
from ups.data.loader import LatentBatch, fixed_batches
from ups.data.pdebench import FAMILIES
from ups.data.samples import LatentSamples
from ups.models.denoiser import Denoiser, Prediction, predict
from ups.models.operator import Operator
from ups.models.sizes import from_settings
from ups.models.steady import SteadyModel
from ups.models.weights import load_model
from ups.run import Run
from ups.training.inputs import field_rms, open_cache

SMALLEST_RESIDUAL = 1e-3
MODELS = {"transient": ("operator", from_settings(Operator)), "steady": ("steady", from_settings(SteadyModel))}


class Residuals:
    """Residuals of the models among the inputs of a run, on the families that these are for."""

    def __init__(self, run: Run) -> None:
        self.models = {
            kind: load_model(make, run.data_root, run.inputs[stage])
            for kind, (stage, make) in MODELS.items()
            if stage in run.inputs
        }
        self.cache: LatentCache = open_cache(run, *self.models)

    @torch.no_grad()
    def of(self, batch: LatentBatch, denoiser: Denoiser) -> tuple[Tensor, Prediction]:
        """Residual y (B, N, D) of unit variance, and the prediction it belongs to."""
        prediction = self._predict(batch)
        return (batch.z_next - prediction.z_pred) / denoiser.units(prediction, batch.domain), prediction

    @torch.no_grad()
    def set_scale(self, denoiser: Denoiser, valid: LatentSamples, sizes: dict[str, int]) -> None:
        """Fill in the median RMS of the residual of every family on validation samples, one value per field.

        Training residuals would be too small where a model has learned the training set by heart; a mean would be that
        of the one trajectory it fails on.
        """
        for family, samples in fixed_batches(valid.num_samples, sizes):
            batch = valid.load(family, samples)
            prediction = self._predict(batch)
            error = (batch.z_next - prediction.z_pred) / prediction.unit
            rms = field_rms(error, batch.domain.family).median(0).values.clamp(min=SMALLEST_RESIDUAL)
            channels = batch.z.shape[-1]
            denoiser.scale[batch.domain.family, :channels] = rms.repeat_interleave(channels // len(rms))

    def _predict(self, batch: LatentBatch) -> Prediction:
        is_steady = list(FAMILIES.values())[batch.domain.family].steady
        model = self.models["steady" if is_steady else "transient"].to(batch.z.device)
        return predict(model, batch.z, batch.coefficients, batch.condition, batch.domain)
