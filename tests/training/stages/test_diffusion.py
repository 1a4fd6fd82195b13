"""What the denoiser learns: what the operator misses in a step, and the steady model in a solution."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.training.jobs import section
from tests.untrained import make_root_of
from ups.data.pdebench import FAMILIES
from ups.data.samples import LatentBatch
from ups.models.operator import Operator, SteadyModel
from ups.models.weights import from_settings, load_model
from ups.runs.run import Run
from ups.training.distributed import Draw
from ups.training.inputs import field_rms
from ups.training.stage import Stage
from ups.training.stages import consistency, diffusion, operator, steady
from ups.training.stages.diffusion import Residuals, residual_power

MODELS = {"compressible_ns_1d": ("operator", Operator), "darcy_2d": ("steady", SteadyModel)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The diffusion stage of models with random weights, one of each kind."""
    root = make_root_of(tmp_path_factory.mktemp("untrained"), MODELS, count=8)
    return Run.read(root / "06_models/diffusion/0")


@pytest.mark.parametrize("family", MODELS)
def test_residuals_complete_what_a_familys_own_model_says(run: Run, family: str):
    """Residual times unit and scale is truth minus prediction; its median RMS on validation samples is one."""
    stage = diffusion.build(section("diffusion"), run)
    samples = torch.arange(stage.valid.num_samples[family]).numpy()
    batch = stage.valid.load(family, samples)
    name, kind = MODELS[family]
    model = load_model(from_settings(kind), run.data_root, run.inputs[name])
    with torch.no_grad():
        state = model(batch.state, batch.coefficients, batch.condition, batch.domain)
    z_pred = state[..., : batch.z.shape[-1]]
    y, context = Residuals(run).standardized(batch, stage.model)
    completed = z_pred + y * stage.model.residual_unit(context, batch.domain)
    torch.testing.assert_close(completed, batch.z_next, rtol=1e-4, atol=1e-4)
    medians = field_rms(y, batch.domain.family).median(0).values
    assert medians.tolist() == pytest.approx([1.0] * len(FAMILIES[family].fields), rel=1e-3)


def test_residuals_are_not_rounded(run: Run):
    """In bfloat16, in which the denoiser may be trained, the rounding of a prediction is larger than its error."""
    stage, residuals = diffusion.build(section("diffusion"), run), Residuals(run)
    batch = stage.valid.load("compressible_ns_1d", np.arange(2))
    expected = residuals.standardized(batch, stage.model)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(residuals.standardized(batch, stage.model)[0], expected)


def test_residual_scales_do_not_depend_on_memory(run: Run):
    """Measured on one sample at a time they are those of all validation samples at once."""
    little = replace(run, launch=run.launch.model_copy(update={"memory_gigabytes": 1e-6}))
    expected, found = (diffusion.build(section("diffusion"), own).model.residual_rms for own in (run, little))
    assert expected.count_nonzero() and torch.allclose(found, expected, rtol=1e-4)


def test_losses_are_relative_to_large_residuals_only():
    """A residual of mean square 4 counts by its quarter; one of 1e-6, which is noise, is not blown up."""
    y = torch.stack([torch.full((3, 2), 2.0), torch.full((3, 2), 1e-3)])
    assert residual_power(y).tolist() == [4.0, 1.0]


def test_student_is_trained_at_the_adjacent_noise_level(run: Run, monkeypatch: pytest.MonkeyPatch):
    """Easy consistency tuning at stage 0 of its schedule: the target has the level (1 - n(sigma) / q) sigma."""
    levels, config = [], section("consistency")
    teacher = diffusion.build(section("diffusion"), run)
    monkeypatch.setattr(consistency, "load_settings", lambda *_: teacher.settings)
    denoiser = teacher.model
    monkeypatch.setattr(consistency, "load_model", lambda *_: denoiser)
    monkeypatch.setattr(consistency, "consistency_loss", lambda *inputs: levels.extend(inputs[-2:]) or torch.ones(2))
    inputs = run.inputs | {"diffusion": {}}
    stage = consistency.build(config, Run(**{**vars(run), "inputs": inputs}))
    batch = stage.valid.load("darcy_2d", torch.arange(2).numpy())
    stage.loss(stage.model, batch, Draw((0,), 2, slice(0, 2), torch.device("cpu")))
    sigma, sigma_next = levels
    n = 1 + config.k / (1 + (config.b * sigma).exp())
    torch.testing.assert_close(sigma_next, (1 - n / config.q).clamp(min=0) * sigma)


def test_transient_and_steady_families_are_kept_apart(run: Run):
    """The operator learns steps of transient families alone, the steady model solutions of steady ones."""
    assert operator.build(section("operator"), run).train.families == ["compressible_ns_1d"]
    assert steady.build(section("steady"), run).train.families == ["darcy_2d"]


def test_only_families_with_a_model_have_residuals(run: Run):
    """Without a steady model among its inputs a denoiser learns nothing of steady families."""
    alone = Run(**{**vars(run), "inputs": {key: run.inputs[key] for key in ("latent_cache", "operator")}})
    assert diffusion.build(section("diffusion"), alone).train.families == ["compressible_ns_1d"]
    assert diffusion.build(section("diffusion"), run).train.families == ["compressible_ns_1d", "darcy_2d"]


class Recorder:
    """A model that keeps the noisy residuals and levels that it gets, and returns a multiple of the residuals."""

    def __init__(self, factor: float) -> None:
        self.factor, self.x, self.sigma = factor, [], []

    def __call__(self, x: Tensor, sigma: Tensor, **_: object) -> Tensor:
        self.x.append(x)
        self.sigma.append(sigma)
        return self.factor * x


def missed(run: Run, stage: Stage) -> tuple[LatentBatch, Tensor]:
    """Two samples of which the operator misses 0.01 and 30 units, and these residuals y (B, N, D)."""
    batch, residuals = stage.valid.load("compressible_ns_1d", np.arange(2)), Residuals(run)
    context = residuals.standardized(batch, stage.model)[1]
    unit = stage.model.residual_unit(context, batch.domain) * torch.tensor([0.01, 30.0])[:, None, None]
    batch = replace(batch, z_next=context.z_pred + unit)
    return batch, residuals.standardized(batch, stage.model)[0]


def draw(step: int) -> Draw:
    """The random numbers of a step for two samples."""
    return Draw((0, 2, step), 2, slice(0, 2), torch.device("cpu"), step)


def test_no_sample_dominates_the_denoising_loss(run: Run):
    """Of D = 0 the loss is (sigma^2 + 1) / sigma^2 times y^2, but times 1 where y is larger."""
    stage, zero = diffusion.build(section("diffusion"), run), Recorder(0.0)
    batch, y = missed(run, stage)
    values = stage.loss(zero, batch, draw(0))
    (sigma,) = zero.sigma
    power = y.square().mean((1, 2))
    assert power.tolist() == pytest.approx([1e-4, 900.0], rel=0.01)
    torch.testing.assert_close(values, (1 + sigma**-2) * power.clamp(max=1.0))


def test_no_sample_dominates_the_loss_of_the_student(run: Run):
    """Of D = x at the levels t and s the loss is (t - s) n^2 over the power of the residual, but at least over 1."""
    run = Run.read(run.data_root / "06_models/consistency/0")
    stage, same = consistency.build(section("consistency"), run), Recorder(1.0)
    batch, y = missed(run, stage)
    values = stage.loss(same, batch, draw(0))
    (t, s), n = same.sigma, (same.x[0] - y) / same.sigma[0][:, None, None]
    power = y.square().mean((1, 2)).clamp(min=1.0)
    torch.testing.assert_close(values, (t - s) * n.square().mean((1, 2)) / power, rtol=1e-3, atol=0.0)
