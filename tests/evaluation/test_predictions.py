"""What methods predict: means of ensembles, and their members beside the truth."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from ups.diffusion.samplers import Normal
from ups.evaluation.predictions import HORIZONS, corrector_mode, predict
from ups.metrics.ensembles import ensemble_errors
from ups.models.sizes import Domain
from ups.surrogate.surrogate import Correction, Setting, rollout

CONFIG = SimpleNamespace(ensemble_size=4)
CORRECTION = Correction("refine", 1.0, 0.002, 2, 1.0, 0.0)
ON = {("diffusion", "compressible_ns_1d"): CORRECTION}
SETTING = Setting("compressible_ns_1d", Domain("advection_1d", (8,), (True,)), torch.zeros(2, 3, 0), torch.zeros(2, 1))


@dataclass(frozen=True)
class AddsNoise:
    """Latents are the fields; the operator halves them, the diffusion adds noise besides."""

    denoiser: bool = True
    student: None = None
    corrections: dict = field(default_factory=lambda: ON)

    def encode(self, u: Tensor, family: str) -> Tensor:
        return u

    decode = encode

    def model(self, family: str) -> str:
        return family

    def plain_step(self, setting: Setting):
        return lambda z: z / 2

    def diffusion_step(self, setting: Setting, correction: Correction, normal: Normal):
        assert correction == CORRECTION
        return lambda z: z / 2 + normal(1, *z.shape)[0].exp()


def fields() -> Tensor:
    """Draw two trajectories of five snapshots with three channels."""
    return torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0))


def test_one_step_starts_from_the_truth_and_a_rollout_from_its_first_snapshot():
    """A method without an ensemble predicts half of each snapshot, or 2^-t of the first."""
    u_ref = fields()
    predictions = predict(AddsNoise(), u_ref, SETTING, CONFIG, torch.Generator())
    assert torch.equal(predictions["operator", "one_step"].u, u_ref[:, :-1] / 2)
    assert torch.equal(predictions["operator", "rollout"].u, rollout(lambda u: u / 2, u_ref[:, 0], 4)[:, 1:])
    assert {key for key, prediction in predictions.items() if prediction.ensemble is not None} == {
        ("diffusion", "one_step"),
        ("diffusion", "rollout"),
    }


def test_ensembles_have_a_mean_and_errors_of_their_members():
    """The prediction is the mean of all members, the scores are the means of those of two independent halves.

    The noise of one half is that of the other, negated.
    """
    u_ref = fields()
    predictions = predict(AddsNoise(), u_ref, SETTING, CONFIG, torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(7)
    noise = torch.stack([torch.randn(4, 3, 8, generator=generator) for _ in range(8)], 1).unflatten(0, (2, 2))
    expected: dict[str, list[Tensor]] = {"one_step": [], "rollout": []}
    for sign in (1, -1):
        added = (sign * noise).exp()
        u, path = u_ref[:, 0], []
        for t in range(4):
            u = u / 2 + added[:, :, 4 + t]
            path.append(u)
        expected["one_step"].append(u_ref[:, :-1] / 2 + added[:, :, :4])
        expected["rollout"].append(torch.stack(path, 2))
    for horizon, halves in expected.items():
        prediction = predictions["diffusion", horizon]
        assert torch.allclose(prediction.u, torch.cat(halves).mean(0))
        first, second = (vars(ensemble_errors(half, u_ref[:, 1:])) for half in halves)
        for name, values in vars(prediction.ensemble).items():
            assert torch.allclose(values, (first[name] + second[name]) / 2)


def test_a_corrector_that_is_off_is_the_operator():
    """For a family without correction the method predicts exactly what the operator does, without an ensemble."""
    surrogate = AddsNoise(corrections={("diffusion", "burgers_1d"): CORRECTION})
    predictions = predict(surrogate, fields(), SETTING, CONFIG, torch.Generator())
    for horizon in HORIZONS:
        assert predictions["diffusion", horizon] is predictions["operator", horizon]
        assert predictions["diffusion", horizon].ensemble is None


def test_mode_says_how_residuals_are_drawn():
    """Off where there is no correction; nothing is said of methods that draw none, or were not trained."""
    surrogate, families = AddsNoise(), ("compressible_ns_1d", "burgers_1d")
    assert [corrector_mode(surrogate, "diffusion", family) for family in families] == ["refine", "off"]
    assert [corrector_mode(surrogate, method, "burgers_1d") for method in ("operator", "consistency", "codec")] == [
        None
    ] * 3
