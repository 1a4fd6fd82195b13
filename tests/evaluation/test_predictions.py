"""What methods predict: means of ensembles, and their members beside the truth."""

from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ups.diffusion import Normal, antithetic
from ups.evaluation.predictions import (
    HORIZONS,
    Compute,
    Forecast,
    Prediction,
    Slab,
    corrector_mode,
    predict,
    predict_trivially,
    prediction_of,
    steppers,
)
from ups.metrics.ensembles import EnsembleErrors, ensemble_errors
from ups.models.sizes import Domain
from ups.surrogate.surrogate import Correction, Setting, Surrogate, rollout

NUM_MEMBERS = 4
CORRECTION = Correction("refine", 1.0, 0.002, 2, 1.0, 0.0)
ON = {("diffusion", "compressible_ns_1d"): CORRECTION}
SETTING = Setting("compressible_ns_1d", Domain("advection_1d", (8,), (True,)), torch.zeros(2, 3, 0), torch.zeros(2, 1))


@dataclass(frozen=True)
class AddsNoise:
    """Latents are the fields; the operator halves them, the diffusion adds noise besides."""

    denoiser: bool = True
    student: None = None
    corrections: dict = field(default_factory=lambda: ON)
    latent_scales: dict = field(default_factory=dict)

    offset: float = 0.0

    def encode(self, u: Tensor, family: str) -> Tensor:
        return u

    def decode(self, z: Tensor, family: str) -> Tensor:
        return z[..., :8] + self.offset

    as_stored = Surrogate.as_stored

    def model(self, family: str) -> str:
        return family

    def plain_step(self, setting: Setting):
        return lambda z: z[..., :8] / 2

    def diffusion_step(self, setting: Setting, correction: Correction, normal: Normal):
        assert correction == CORRECTION
        return lambda z: z[..., :8] / 2 + normal(1, *z[..., :8].shape)[0].exp()


def fields() -> Tensor:
    """Draw two trajectories of five snapshots with three channels."""
    return torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0))


def slabs(u_ref: Tensor, lengths: list[int]) -> list[Slab]:
    """Trajectories (B, T, C, X) in slabs of these numbers of steps."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    places = [slice(start, start + length + 1) for start, length in zip(starts, lengths, strict=True)]
    found = [(place.start, u_ref[:, place]) for place in places]
    before = [u_ref[:, [max(0, start - 1)]] for start, _ in found]
    return [
        Slab(start, u[:, 1:], u_ref[:, 0], u[:, :1], u, last) for (start, u), last in zip(found, before, strict=True)
    ]


def predicted(surrogate: AddsNoise, lengths: list[int], at_once: int = NUM_MEMBERS) -> dict[tuple, Prediction]:
    """Predictions of all methods for the trajectories, joined over the slabs."""
    generators = {horizon: torch.Generator().manual_seed(7 + i) for i, horizon in enumerate(HORIZONS)}
    noises = {horizon: antithetic(generator) for horizon, generator in generators.items()}
    active = {h: steppers(surrogate, SETTING.family, NUM_MEMBERS, lambda _, h=h: noises[h]) for h in HORIZONS}
    forecasts = {m: Forecast({h: active[h][m] for h in HORIZONS}, SETTING) for m in active["rollout"]}
    batch, parts = SimpleNamespace(setting=SETTING, members_at_once=at_once), defaultdict(list)
    for slab in slabs(fields(), lengths):
        everything = [*predict_trivially(surrogate, SETTING.family, slab), *predict(surrogate, batch, forecasts, slab)]
        for each in everything:
            for horizon in each.horizons:
                target = slab.target[:, each.times]
                parts[each.method, horizon].append(prediction_of(each.members(slice(None)), target))
    return {key: joined(some) for key, some in parts.items()}


def joined(parts: list[Prediction]) -> Prediction:
    """One prediction for all times."""
    u = torch.cat([part.u for part in parts], 1)
    if parts[0].ensemble is None:
        return Prediction(u)
    columns = zip(*(vars(part.ensemble).values() for part in parts), strict=True)
    return Prediction(u, EnsembleErrors(*(torch.cat(values, 1) for values in columns)))


def test_one_step_starts_from_the_truth_and_a_rollout_from_its_first_snapshot():
    """A method without an ensemble predicts half of each snapshot, or 2^-t of the first."""
    u_ref, predictions = fields(), predicted(AddsNoise(), [4])
    assert torch.equal(predictions["operator", "one_step"].u, u_ref[:, :-1] / 2)
    assert torch.equal(predictions["operator", "rollout"].u, rollout(lambda u: u / 2, u_ref[:, 0], 4))
    assert {key for key, prediction in predictions.items() if prediction.ensemble is not None} == {
        ("diffusion", "one_step"),
        ("diffusion", "rollout"),
    }


@pytest.mark.parametrize("lengths", [[4], [3, 1], [1, 1, 1, 1]])
def test_states_hold_the_true_snapshot_before(lengths: list[int]):
    """Whatever the slabs, a single step starts from a snapshot and the one before it, the first one from itself."""
    u_ref = fields()
    states = torch.stack([slab.state(step) for slab in slabs(u_ref, lengths) for step in range(len(slab.target[0]))], 1)
    before = torch.cat([u_ref[:, :1], u_ref[:, :-2]], 1)
    assert torch.equal(states, torch.cat([u_ref[:, :-1], before], -1))


def test_trivial_methods_repeat_the_truth():
    """Persistence is the snapshot before, or in rollouts the first one; the codec decodes what it has encoded."""
    u_ref, predictions = fields(), predicted(AddsNoise(), [3, 1])
    assert torch.equal(predictions["persistence", "one_step"].u, u_ref[:, :-1])
    assert torch.equal(predictions["persistence", "rollout"].u, u_ref[:, :1].expand_as(u_ref[:, 1:]))
    assert all(torch.equal(predictions["codec", horizon].u, u_ref[:, 1:]) for horizon in HORIZONS)


def test_the_codec_decodes_what_is_stored():
    """Where latents are rounded in the cache the error of the codec has that of rounding in it."""
    u_ref, predictions = fields(), predicted(AddsNoise(latent_scales={SETTING.family: 0.5}), [4])
    rounded = torch.round(2 * u_ref[:, 1:]) / 2
    assert torch.equal(predictions["codec", "one_step"].u, rounded)
    assert torch.allclose(predictions["rounding", "one_step"].u, rounded)
    assert ("rounding", "rollout") not in predictions


def test_the_error_of_rounding_is_not_that_of_the_codec():
    """A codec that adds 3 to every field has that error with and without rounding: the method `rounding` has not."""
    lossy = AddsNoise(latent_scales={SETTING.family: 0.5}, offset=3.0)
    u_ref, predictions = fields(), predicted(lossy, [4])
    assert torch.allclose(predictions["codec", "one_step"].u, torch.round(2 * u_ref[:, 1:]) / 2 + 3)
    assert torch.allclose(predictions["rounding", "one_step"].u, torch.round(2 * u_ref[:, 1:]) / 2, atol=1e-6)
    other = AddsNoise(latent_scales={"burgers_1d": 0.5}, offset=3.0)
    assert ("rounding", "one_step") not in predicted(other, [4])


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [3, 1]], ids=str)
@pytest.mark.parametrize("at_once", [1, 3])
def test_slabs_and_members_at_once_change_no_number(lengths: list[int], at_once: int):
    """Noise included, the predictions of shorter slabs, with fewer members decoded at once, are the same."""
    whole, parts = predicted(AddsNoise(), [4]), predicted(AddsNoise(), lengths, at_once)
    assert whole.keys() == parts.keys()
    for key, prediction in whole.items():
        assert torch.equal(parts[key].u, prediction.u)
        if prediction.ensemble is not None:
            others = vars(parts[key].ensemble)
            assert all(torch.equal(others[name], values) for name, values in vars(prediction.ensemble).items())


@pytest.mark.parametrize("lengths", [[4], [1, 1, 1, 1], [2, 2]], ids=str)
def test_of_single_steps_every_other_one_can_be_made(lengths: list[int]):
    """With a stride of 3 single steps start from the first and the fourth snapshot, however long the slabs are."""
    step = steppers(AddsNoise(corrections={}), SETTING.family, 1, None)["operator"]
    forecast, u_ref, found = Forecast(dict.fromkeys(HORIZONS, step), SETTING, stride=3), fields(), []
    for slab in slabs(u_ref, lengths):
        for horizon, times, z in forecast.advance(slab):
            found += [(slab.target[:, times], z[0])] if horizon == "one_step" else []
    target, z = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    assert torch.equal(target, u_ref[:, [1, 4]]) and torch.equal(z, u_ref[:, [0, 3]] / 2)


def test_ensembles_have_a_mean_and_errors_of_their_members():
    """The prediction is the mean of all members, the scores are the means of those of two independent halves.

    The noise of one half is that of the other, negated.
    """
    u_ref, predictions = fields(), predicted(AddsNoise(), [4])
    noises = []
    for seed in (7, 8):
        generator = torch.Generator().manual_seed(seed)
        noises += [torch.randn(4, 3, 8, generator=generator) for _ in range(4)]
    noise = torch.stack(noises, 1).unflatten(0, (2, 2))
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


def test_a_corrector_that_is_off_predicts_nothing_of_its_own():
    """For a family without correction there are steps of the operator alone."""
    surrogate = AddsNoise(corrections={("diffusion", "burgers_1d"): CORRECTION})
    assert set(steppers(surrogate, SETTING.family, NUM_MEMBERS, None)) == {"operator"}


def test_memory_is_shared_among_snapshots():
    """Twice the memory or half a snapshot holds twice as many of them; too little memory holds none."""
    counts = [Compute(torch.device("cpu"), memory).num_snapshots(4096, 8) for memory in (2**10, 2**22, 2**23)]
    assert counts[0] == 0 < counts[1] and abs(counts[2] - 2 * counts[1]) <= 1
    assert Compute(torch.device("cpu"), 2**22).num_snapshots(2048, 8) - 2 * counts[1] in (0, 1)


def test_mode_says_how_residuals_are_drawn():
    """Off where there is no correction; nothing is said of methods that draw none, or were not trained."""
    surrogate, families = AddsNoise(), ("compressible_ns_1d", "burgers_1d")
    assert [corrector_mode(surrogate, "diffusion", family) for family in families] == ["refine", "off"]
    assert [corrector_mode(surrogate, method, "burgers_1d") for method in ("operator", "consistency", "codec")] == [
        None
    ] * 3
