"""Networks from which an adaptation starts."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.training.jobs import adapt_section
from ups.data.families import condition_features
from ups.errors import ConfigFault
from ups.models.operator import Operator
from ups.surrogate.surrogate import Surrogate
from ups.training.examples import Trajectories, encode
from ups.training.starts import (
    Start,
    donors_of,
    fno_scratch,
    rollout_error,
    scratch,
    starts,
    surrogate_of,
)


def error_of(start: Start, few: Trajectories) -> float:
    """Of a rollout before any training."""
    return rollout_error(start.codec, start.model, few)


@pytest.mark.parametrize("family", ["advection_1d", "compressible_ns_1d", "darcy_2d"])
def test_a_known_family_has_its_own_weights(surrogate: Surrogate, trajectories: dict[str, Trajectories], family: str):
    """With equal codec, statistics and filter the network alone predicts what the network of all families does."""
    few, model = trajectories[family], surrogate.model(family)
    assert model is not None
    start, *_ = starts(surrogate, few, adapt_section())
    assert start.donor == family and start.settings["sizes"]["families"] == [family]
    assert start.settings["sizes"]["history"] == ([family] if family == "compressible_ns_1d" else [])
    row = model.rows[family]
    for name, buffer in start.model.statistics.named_buffers():
        buffer.copy_(getattr(model.statistics, name)[row : row + 1][tuple(map(slice, buffer.shape))])
    if isinstance(start.model, Operator):
        for name, buffer in start.model.persistence.named_buffers():
            buffer.copy_(getattr(model.persistence, name)[row : row + 1][tuple(map(slice, buffer.shape))])
        start.model.persistence.find_fitted()
    (batch,) = replace(encode(surrogate.codec, few), history=True).spread(6, 6)
    with torch.no_grad():
        models = start.model.eval(), model
        state = batch.z if family == "darcy_2d" else batch.state
        found, expected = (m(state, batch.coefficients, batch.condition, batch.domain) for m in models)
    assert torch.allclose(found, expected, atol=1e-6)


def test_a_known_family_has_two_systems_of_units(surrogate: Surrogate, trajectories: dict[str, Trajectories]):
    """Those of the trained data, then those of the new trajectories; both with the trained head and a solved one."""
    few, model = trajectories["compressible_ns_1d"], surrogate.operator
    assert model is not None
    *found, random = starts(surrogate, few, adapt_section())
    assert random.donor is None and {start.donor for start in found} == {"compressible_ns_1d"}
    assert starts(surrogate, few, adapt_section(donor="compressible_ns_1d"))[-1].donor is not None
    trained = model.statistics.step_rms[model.rows["compressible_ns_1d"], :6]
    z = encode(surrogate.codec, few).z.unflatten(-1, (3, 2))
    new = z.diff(dim=1).square().mean(dim=(0, 1, 2, 4)).sqrt().repeat_interleave(2)
    assert not torch.allclose(trained, new)
    assert [start.solves_head for start in found] == [False, False, True, True]
    for start, expected in zip(found, (trained, new, trained, new), strict=True):
        assert torch.allclose(start.model.statistics.step_rms[0], expected, rtol=1e-4)


def test_limits_are_those_of_both(surrogate: Surrogate, trajectories: dict[str, Trajectories]):
    """A start limits states no more than the trained model did, and not below the new trajectories."""
    few, model = trajectories["compressible_ns_1d"], surrogate.operator
    assert model is not None
    larger = replace(few, u=few.u * 50)
    start, *_ = starts(surrogate, larger, adapt_section())
    row, channels = model.rows["compressible_ns_1d"], start.model.statistics.max_fluctuation.shape[1]
    for name in ("max_mean", "max_fluctuation", "max_growth", "max_rms"):
        found, trained = getattr(start.model.statistics, name)[0], getattr(model.statistics, name)[row, :channels]
        assert (found >= trained).all(), name
        assert name == "max_growth" or (found > trained).any(), name  # growth is a ratio, and no larger here
    z = encode(start.codec, larger).z.flatten(0, 1)
    assert torch.equal(start.model.statistics.clamp_state(z, encode(start.codec, larger).domain), z)


def test_an_open_boundary_conserves_nothing(surrogate: Surrogate, trajectories: dict[str, Trajectories]):
    """The direction of the conserved integral is that of the trained model, and 0 if fluid can leave the domain."""
    few = trajectories["advection_1d"]
    closed, *_ = starts(surrogate, few, adapt_section())
    dataset = replace(few.dataset, boundary=("outflow",))
    opened, *_ = starts(surrogate, replace(few, dataset=dataset), adapt_section())
    assert closed.model.conserved.abs().sum() > 0 == opened.model.conserved.abs().sum()


def test_another_family_takes_a_network(surrogate: Surrogate, trajectories: dict[str, Trajectories]):
    """Trunk, bias and head are half the donor's and half random; so is the stem, for as many latents as both have."""
    few, config = trajectories["advection_1d"], adapt_section(donor="compressible_ns_1d")
    (start,), plain, source = starts(surrogate, few, config), scratch(surrogate, few, config), surrogate.operator
    assert source is not None and start.donor == "compressible_ns_1d" and not start.solves_head
    assert start.codec.groups == plain.codec.groups
    row, own, other = source.rows["compressible_ns_1d"], 2, 6  # latents of one and of three fields
    found, trained, random = start.model.mixer, source.mixer, plain.model.mixer

    def is_between(found: Tensor, trained: Tensor, random: Tensor) -> bool:
        return torch.allclose(found, (trained + random) / 2, atol=1e-6)

    trunk, new = trained.trunks[row].state_dict(), random.trunks[0].state_dict()
    assert all(is_between(value, trunk[name], new[name]) for name, value in found.trunks[0].state_dict().items())
    assert is_between(found.head.weights[0], trained.head.weights[row][:, :own], random.head.weights[0])
    assert is_between(found.head.biases[0], trained.head.biases[row][:own], random.head.biases[0])
    assert is_between(found.stem.biases[0], trained.stem.biases[row], random.stem.biases[0])
    assert is_between(found.summary.biases[0], trained.summary.biases[row], random.summary.biases[0])
    for half in (0, 1):
        place, of = slice(half * own, half * own + own), slice(half * other, half * other + own)
        stems = found.stem.weights[0][place], trained.stem.weights[row][of], random.stem.weights[0][place]
        assert is_between(*stems)
        assert is_between(
            found.summary.weights[0][place], trained.summary.weights[row][of], random.summary.weights[0][place]
        )
    statistics = start.model.statistics.state_dict()
    assert all(torch.equal(statistics[name], value) for name, value in plain.model.statistics.state_dict().items())


def test_an_own_network_on_another_grid_keeps_the_change_before(
    surrogate: Surrogate, trajectories: dict[str, Trajectories]
):
    """All inputs of the stem are the trained ones, those of the change since the snapshot before too."""
    few = trajectories["compressible_ns_1d"]
    few = replace(few, u=few.u[..., :15], dataset=replace(few.dataset, grid=(15,)))
    start, *_ = starts(surrogate, few, adapt_section(donor="compressible_ns_1d"))
    source = surrogate.operator
    assert source is not None and start.settings["sizes"]["history"] == ["compressible_ns_1d"]
    trained, found = source.mixer.stem.weights[source.rows["compressible_ns_1d"]], start.model.mixer.stem.weights[0]
    latents = start.settings["sizes"]["latent_channels"][0]
    for part in range(3):
        own, other = found[part * latents], trained[part * 6]
        assert torch.equal(own, other), part


def test_an_unknown_family_has_every_donor_of_its_axes(surrogate: Surrogate, trajectories: dict[str, Trajectories]):
    """A variant that no model knows can start from each family in 1D, from none in 2D, and from random weights."""
    few = trajectories["advection_1d"]
    variant = replace(few, dataset=replace(few.dataset, family="burgers_1d", parameters={"nu": 0.1}))
    found = starts(surrogate, variant, adapt_section())
    assert [start.donor for start in found] == ["advection_1d", "compressible_ns_1d", None]
    assert not any(start.solves_head for start in found)


def test_a_known_family_can_count_as_unknown(surrogate: Surrogate, trajectories: dict[str, Trajectories]):
    """`other` leaves out the family's own trunk."""
    found = starts(surrogate, trajectories["advection_1d"], adapt_section(donor="other"))
    assert [start.donor for start in found] == ["compressible_ns_1d", None]


@pytest.mark.parametrize(
    ("family", "donor", "n", "expected"),
    [
        ("compressible_ns_1d", None, 16, []),
        ("compressible_ns_1d", None, 15, ["compressible_ns_1d"]),
        ("compressible_ns_1d", "other", 16, ["advection_1d"]),
        ("advection_1d", "other", 16, ["compressible_ns_1d"]),
        ("advection_1d", "compressible_ns_1d", 16, ["compressible_ns_1d"]),
    ],
)
def test_of_a_shared_trunk_one_family_is_the_donor(
    surrogate: Surrogate,
    trajectories: dict[str, Trajectories],
    family: str,
    donor: str | None,
    n: int,
    expected: list[str],
):
    """The one that is named; else the own one, on a grid that its patch does not divide too."""
    operator = copy.deepcopy(surrogate.operator)
    operator.backbone = replace(operator.backbone, separate_trunks=False)
    dataset = replace(trajectories[family].dataset, grid=(n,))
    assert list(donors_of(replace(surrogate, operator=operator, steady=None), dataset, donor)) == expected


def test_a_donor_with_other_axes_is_refused(surrogate: Surrogate, trajectories: dict[str, Trajectories]):
    """One line with the families that can be named."""
    with pytest.raises(ConfigFault, match="^adapt.donor = darcy_2d does not fit .*: advection_1d, compressible_ns_1d$"):
        starts(surrogate, trajectories["advection_1d"], adapt_section(donor="darcy_2d"))


def test_a_grid_that_the_patch_does_not_divide_is_new(surrogate: Surrogate, trajectories: dict[str, Trajectories]):
    """On 15 points the family's own patch of 2 cannot be used: its network gets another codec, as those of others."""
    few = trajectories["advection_1d"]
    odd = replace(few, u=few.u[..., :15], dataset=replace(few.dataset, grid=(15,)))
    found, source = starts(surrogate, odd, adapt_section()), surrogate.operator
    assert [start.donor for start in found] == ["advection_1d", "advection_1d", "compressible_ns_1d", None]
    assert [start.solves_head for start in found] == [False, True, False, False]
    assert {start.codec.groups["advection_1d/fields"].patch for start in found} == {3}
    assert source is not None  # weights of the same equation are kept as they are
    trunk = source.mixer.trunks[source.rows["advection_1d"]].state_dict()
    assert all(torch.equal(trunk[name], value) for name, value in found[0].model.mixer.trunks[0].state_dict().items())


def test_the_error_is_that_of_the_rollout(surrogate: Surrogate, trajectories: dict[str, Trajectories]):
    """NRMSE by hand: RMSE over space by RMS, mean over trajectories, fields and times."""
    few, model = trajectories["compressible_ns_1d"], surrogate.operator
    assert model is not None
    examples, whole = encode(surrogate.codec, few), surrogate_of(surrogate.codec, model, "compressible_ns_1d")
    z, errors = examples.z[:, 0], []
    condition = torch.tensor(condition_features(few.dataset)).expand(4, -1)
    for time in range(1, 5):
        with torch.no_grad():
            z = model(z, examples.coefficients, condition, examples.domain)
        u, u_ref = whole.decode(z, "compressible_ns_1d"), few.u[:, time]
        errors.append(((u - u_ref).square().mean(-1) / u_ref.square().mean(-1)).sqrt())
    expected = torch.stack(errors).mean().item()
    assert rollout_error(surrogate.codec, model, few) == pytest.approx(expected, rel=1e-4)


def test_a_fourier_neural_operator_predicts_the_grid(surrogate: Surrogate, trajectories: dict[str, Trajectories]):
    """It has random weights of the seed, finite errors for all families, and two snapshots where ours has two."""
    config = adapt_section(fno={"hidden_channels": 4, "num_layers": 1, "modes": (4, 2, 2), "padding": 0.125})
    for family, few in trajectories.items():
        first, again = (fno_scratch(surrogate, few, config) for _ in range(2))
        assert error_of(first, few) == error_of(again, few) < 100
        assert first.model.statistics.history.has(family) == (family == "compressible_ns_1d")


def test_the_error_that_chooses_does_not_depend_on_units(surrogate: Surrogate, trajectories: dict[str, Trajectories]):
    """Metres or nanometres: the same start has the same error."""
    few = trajectories["advection_1d"]
    starts_of = (few, replace(few, u=1e-9 * few.u))
    error, of_small = (error_of(scratch(surrogate, each, adapt_section()), each) for each in starts_of)
    assert of_small == pytest.approx(error, rel=1e-3)
