"""`Model` predicts what the networks predict, for every kind of array, and what the scores of a run say."""

import gc
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from tests.evaluation.test_coverage import measure
from tests.surrogate.test_wrong_inputs import shift_dt, two_variants, values
from tests.training.jobs import launched
from tests.untrained import STAGE_NAMES, receipt
from ups.config import EvaluationConfig
from ups.data.families import Dataset, condition_features
from ups.data.latent_cache import LatentCache
from ups.data.trajectories import TrajectoryReader
from ups.errors import ConfigFault
from ups.files import place_of
from ups.metrics.errors import nRMSE
from ups.pipelines.evaluation import score_test_split
from ups.surrogate.export import METADATA
from ups.surrogate.family_cards import find_family
from ups.surrogate.model import Model, OutsideTraining, load
from ups.surrogate.results import Ensemble
from ups.surrogate.surrogate import Setting
from ups.surrogate.trained import Trained

FORCES = ("force_x", "force_y")
U_0 = values(3, 1, 8)
CASES = {
    "advection_1d": (U_0, {"steps": 3}),
    "burgers_1d": (values(3, 1, 8), {"steps": 3, "nu": np.array([0.01, 0.05, 0.1])}),
    "compressible_ns_1d": (values(3, 3, 8), {"steps": 3}),
    "darcy_2d": (None, {"nu": values(3, 8, 6)}),
    "diffusion_reaction_2d": (values(3, 2, 8, 6), {"steps": 3}),
    "incompressible_ns_2d": (values(3, 3, 8, 6), {"steps": 3} | {name: values(3, 8, 6) for name in FORCES}),
}
ANY = pytest.mark.parametrize("family", CASES)


def row(options: dict[str, Any], number: int) -> dict[str, Any]:
    """The options of one trajectory of a batch."""
    return {name: value[number] if isinstance(value, np.ndarray) else value for name, value in options.items()}


def test_a_prediction_is_what_the_networks_predict(model: Model):
    """Encode, step by step, decode: with the condition of the data, from latents of u_0, the initial state first."""
    u_0, nu, name = values(2, 1, 8), [0.01, 0.1], "burgers_1d"
    card, networks = model.cards[name], model.surrogate
    z = networks.encode(torch.from_numpy(u_0), name)
    condition = torch.tensor(
        [condition_features(next(d for d in card.datasets if d.parameters["nu"] == n)) for n in nu]
    )
    step = networks.plain_step(Setting(name, card.domain, z[..., :0], condition))
    expected = [u_0]
    for _ in range(3):
        z = step(z)
        expected.append(networks.decode(z, name).numpy())
    np.testing.assert_array_equal(model.predict(name, u_0, steps=3, nu=nu), np.stack(expected, 1))


@ANY
def test_a_batch_is_its_trajectories_one_by_one(model: Model, family: str):
    """Each with its own initial state, parameters and coefficients; a number holds for all."""
    u_0, options = CASES[family]
    u = model.predict(family, u_0, **options)
    assert len(u) == 3 and np.isfinite(u).all() and not np.array_equal(u[0], u[1])
    for number in range(3):
        one = model.predict(family, None if u_0 is None else u_0[number], **row(options, number))
        np.testing.assert_allclose(np.squeeze(one), np.squeeze(u[number]), rtol=1e-5, atol=1e-5)


@ANY
def test_the_first_snapshot_is_the_initial_state(model: Model, family: str):
    """Of steady families there is no axis of time."""
    u_0, options = CASES[family]
    u = model.predict(family, u_0, **options)
    if u_0 is None:
        assert u.shape == (3, 8, 6)
    else:
        assert u.shape == (3, 4, *u_0.shape[1:])
        np.testing.assert_array_equal(u[:, 0], u_0)


@pytest.mark.parametrize("family", [name for name in CASES if name != "darcy_2d"])
def test_a_rollout_gives_the_snapshots_of_a_prediction(model: Model, family: str):
    """One after the other, without the initial state."""
    u_0, options = CASES[family]
    u = model.predict(family, u_0, **options)
    snapshots = list(model.rollout(family, u_0, **options))
    np.testing.assert_array_equal(np.stack(snapshots, 1), u[:, 1:])


@pytest.mark.parametrize("shape", [(8,), (3, 8)], ids=["one state", "trajectories"])
def test_a_labelled_snapshot_has_its_time(model: Model, shape: tuple[int, ...]):
    """Not that of the state that the rollout starts from: it is the snapshot of a prediction."""
    given = xr.DataArray(values(*shape), dims=("run", "x")[-len(shape) :]).assign_coords(time=5.0, x=np.arange(8) / 8)
    u = model.predict("advection_1d", given, steps=3, dt=0.5)
    for step, snapshot in enumerate(model.rollout("advection_1d", given, steps=3, dt=0.5), 1):
        assert float(snapshot["time"]) == 0.5 * step
        xr.testing.assert_identical(snapshot, u.isel(time=step))


def test_a_family_with_history_goes_on_from_two_snapshots(model: Model):
    """The last two snapshots of a prediction lead to its next one; the last alone counts as at rest."""
    u_0 = values(3, 2, 8, 6)
    u = model.predict("diffusion_reaction_2d", u_0, steps=4)
    again = model.predict("diffusion_reaction_2d", u[:, 2], u_before=u[:, 1], steps=2)
    np.testing.assert_allclose(again, u[:, 2:], rtol=1e-4, atol=1e-5)
    (first,) = model.rollout("diffusion_reaction_2d", u[:, 2], u_before=u[:, 1], steps=1)
    np.testing.assert_array_equal(first, again[:, 1])
    at_rest = model.predict("diffusion_reaction_2d", u[:, 2], steps=1)
    same = model.predict("diffusion_reaction_2d", u[:, 2], u_before=u[:, 2], steps=1)
    np.testing.assert_array_equal(at_rest, same)
    assert not np.allclose(at_rest[:, 1], u[:, 3], rtol=1e-4)
    assert model.describe("diffusion_reaction_2d").history and not model.describe("advection_1d").history


def test_a_rollout_makes_no_step_before_it_is_asked_for(model: Model):
    """A thousand million steps begin at once."""
    u_0 = values(8)
    first = list(islice(model.rollout("advection_1d", u_0, steps=10**9), 2))
    np.testing.assert_array_equal(np.stack(first), model.predict("advection_1d", u_0, steps=2)[1:])


def test_a_rollout_keeps_nothing(model: Model):
    """After 300 steps there are as many tensors as after 10."""

    def num_alive() -> int:
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    snapshots = model.rollout("diffusion_reaction_2d", values(2, 2, 8, 6), steps=400)
    next(islice(snapshots, 9, None))
    before = num_alive()
    next(islice(snapshots, 289, None))
    assert num_alive() == before


@pytest.mark.parametrize("dt", [0.75, np.float32(0.75), 0.7500001])
def test_a_multiple_of_dt_takes_several_steps(model: Model, dt: float):
    """Two results of three steps each are every third snapshot."""
    u_0 = values(2, 1, 8)
    every, some = model.predict("advection_1d", u_0, steps=6), model.predict("advection_1d", u_0, steps=2, dt=dt)
    np.testing.assert_array_equal(some, every[:, ::3])
    assert len(list(model.rollout("advection_1d", u_0, steps=2, dt=dt))) == 2


@pytest.mark.parametrize("dt", [0.25, 0.5, np.float32(0.75)])
def test_a_file_has_the_time_step_that_was_asked_for(altered: Callable[..., Model], tmp_path: Path, dt: float):
    """One of several of training, or a multiple of one: it takes the step of `predict`, and says so."""
    used, u_0, described = altered(shift_dt), values(2, 1, 8), {METADATA: ""}
    used.export("burgers_1d", tmp_path / "model.pt2", dt=dt)
    program = torch.export.load(tmp_path / "model.pt2", extra_files=described).module()
    expected = used.predict("burgers_1d", u_0, steps=1, nu=0.1, dt=dt)[:, 1]
    np.testing.assert_allclose(program(torch.from_numpy(u_0), torch.full((2,), 0.1)), expected, rtol=1e-5, atol=1e-6)
    assert json.loads(described[METADATA])["dt"] == dt


@pytest.mark.parametrize("family", ["advection_1d", "darcy_2d"])
def test_parameters_of_one_trained_value_may_be_left_out(model: Model, family: str):
    """They then have this value."""
    u_0, options = CASES[family]
    beta = model.describe(family).parameters["beta"][0]
    expected = model.predict(family, u_0, beta=beta, **options)
    np.testing.assert_array_equal(model.predict(family, u_0, **options), expected)


@ANY
def test_tensors_give_tensors(model: Model, family: str):
    """With the numbers of arrays."""
    u_0, options = CASES[family]
    expected = model.predict(family, u_0, **options)
    as_tensors = {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in options.items()}
    u = model.predict(family, None if u_0 is None else torch.from_numpy(u_0), **as_tensors)
    assert isinstance(u, torch.Tensor) and u.dtype == torch.float32
    np.testing.assert_array_equal(u.numpy(), expected)


@pytest.mark.parametrize("convert", [np.float64, np.float16, "lists", "order"])
def test_other_types_of_numbers_are_taken(model: Model, convert: Any):
    """Double and half precision, lists, other orders in memory."""
    u_0 = values(2, 2, 8, 6).astype(np.float16)
    converted = {"lists": u_0.tolist, "order": lambda: np.asfortranarray(u_0)}
    given = converted[convert]() if isinstance(convert, str) else u_0.astype(convert)
    expected = model.predict("diffusion_reaction_2d", u_0.astype(np.float32), steps=2)
    np.testing.assert_array_equal(model.predict("diffusion_reaction_2d", given, steps=2), expected)


@pytest.mark.parametrize(("shape", "result"), [((8,), (3, 8)), ((1, 8), (3, 1, 8)), ((4, 1, 8), (4, 3, 1, 8))])
def test_axes_that_the_input_lacks_are_not_in_the_result(model: Model, shape, result):
    """Of trajectories, of fields."""
    assert model.predict("advection_1d", values(*shape), steps=2).shape == result


def test_a_dataset_gives_a_dataset(model: Model):
    """Variables, dimensions and coordinates of the caller in any order; time and parameters besides."""
    u_0 = values(3, 2, 8, 6)
    coordinates = {"x": np.arange(8) / 10, "run": ["a", "b", "c"]}
    variables = {name: (("run", "x", "y"), own) for name, own in zip("uv", u_0.swapaxes(0, 1), strict=True)}
    given = xr.Dataset(variables, coordinates)[["v", "u"]].transpose("y", "x", "run")
    u = model.predict("diffusion_reaction_2d", given, steps=2)
    expected = model.predict("diffusion_reaction_2d", u_0, steps=2)
    assert u["u"].dims == ("run", "time", "x", "y") and list(u) == ["u", "v"]
    np.testing.assert_array_equal(u.to_dataarray("field").transpose("run", "time", "field", "x", "y"), expected)
    np.testing.assert_allclose(u["time"], [0, 0.25, 0.5])
    xr.testing.assert_equal(u["x"], given["x"])
    xr.testing.assert_equal(u["run"], given["run"])
    assert u.sel(run="b", time=0.5, method=None)["v"].shape == (8, 6)


def test_an_array_with_a_dimension_of_fields_is_the_dataset(model: Model):
    """`field` is the order of the family's fields; one field needs none."""
    u_0 = values(2, 8, 6)
    array = xr.DataArray(u_0, dims=("field", "x", "y"))
    dataset = xr.Dataset({"u": (("x", "y"), u_0[0]), "v": (("x", "y"), u_0[1])})
    named = array.assign_coords(field=["u", "v"]).sel(field=["v", "u"])  # names count, not the order
    results = [model.predict("diffusion_reaction_2d", given, steps=1) for given in (array, dataset, named)]
    xr.testing.assert_identical(*results[:2])
    xr.testing.assert_identical(*results[1:])
    assert model.predict("advection_1d", xr.DataArray(values(8), dims="x"), steps=1)["u"].dims == ("time", "x")


@pytest.mark.parametrize("given_before", [False, True], ids=["after loading", "before loading"])
def test_the_default_type_of_torch_changes_nothing(model: Model, data_root: Path, given_before: bool):
    """Models are float32 whatever new tensors are."""
    expected = model.predict("burgers_1d", values(1, 8), steps=2, nu=0.1)
    torch.set_default_dtype(torch.float64)
    try:
        used = load(data_root, device="cpu") if given_before else model
        found = used.predict("burgers_1d", values(1, 8), steps=2, nu=0.1)
    finally:
        torch.set_default_dtype(torch.float32)
    np.testing.assert_array_equal(found, expected)


@ANY
def test_autocast_changes_nothing(model: Model, family: str):
    """Within autocast a model predicts in float32 as outside of it, and leaves autocast on for the caller."""
    u_0, options = CASES[family]
    expected = model.predict(family, u_0, **options)
    with torch.autocast("cpu", torch.bfloat16):
        np.testing.assert_array_equal(model.predict(family, u_0, **options), expected)
        for step, u in enumerate(() if u_0 is None else model.rollout(family, u_0, **options), 1):
            assert torch.is_autocast_enabled("cpu")
            np.testing.assert_array_equal(u, expected[:, step])


def test_a_model_exported_within_autocast_is_like_others(model: Model, tmp_path: Path):
    """Its steps are those of predictions."""
    u_0, nu = values(2, 1, 8), np.array([0.01, 0.1], np.float32)
    with torch.autocast("cpu", torch.bfloat16):
        model.export("burgers_1d", tmp_path / "burgers.pt2")
    u = torch.export.load(tmp_path / "burgers.pt2").module()(torch.from_numpy(u_0), torch.from_numpy(nu))
    expected = model.predict("burgers_1d", u_0, steps=1, nu=nu)[:, 1]
    assert u.dtype == torch.float32
    np.testing.assert_allclose(u, expected, rtol=1e-5, atol=1e-6)


def test_models_loaded_in_inference_mode_are_like_others(model: Model, data_root: Path):
    """They predict within and outside of it."""
    with torch.inference_mode():
        used = load(data_root, device="cpu")
        within = used.predict("burgers_1d", values(1, 8), steps=2, nu=0.1)
    for found in (within, used.predict("burgers_1d", values(1, 8), steps=2, nu=0.1)):
        np.testing.assert_array_equal(found, model.predict("burgers_1d", values(1, 8), steps=2, nu=0.1))


def test_a_labelled_coefficient_is_read_by_its_dimensions(model: Model):
    """Axes in any order; the dimension of trajectories keeps its name."""
    nu = values(3, 8, 6)
    given = xr.DataArray(nu, dims=("sample", "x", "y"), coords={"sample": [7, 8, 9]}).transpose("y", "sample", "x")
    u = model.predict("darcy_2d", nu=given)
    assert u["u"].dims == ("sample", "x", "y") and u["sample"].values.tolist() == [7, 8, 9]
    np.testing.assert_array_equal(u["u"], model.predict("darcy_2d", nu=nu))


def test_labels_can_be_had_of_any_array(model: Model):
    """Cell centres, times, parameters, the equation."""
    u = model.predict("burgers_1d", values(2, 1, 8), steps=1, nu=[0.01, 0.1], labels=True)
    np.testing.assert_allclose(u["x"], (np.arange(8) + 0.5) / 8)
    np.testing.assert_allclose(u["nu"], [0.01, 0.1])
    assert u["nu"].dims == ("trajectory",) and u.attrs["family"] == "burgers_1d"


def test_labels_are_the_numbers_that_were_given(model: Model):
    """Parameters are 0.4, not what float32 makes of it, for one state and for trajectories."""
    one, some = (model.predict("advection_1d", u, steps=1, beta=0.4, labels=True) for u in (U_0[0, 0], U_0))
    assert one["beta"].item() == 0.4 and some["beta"].values.tolist() == [0.4] * 3


def test_a_result_goes_on_with_its_own_parameters(model: Model):
    """They are its coordinates; what the caller gives comes first."""
    first = model.predict("advection_1d", xr.DataArray(U_0[:, 0], dims=("run", "x")), steps=2, beta=[0.1, 0.2, 0.3])
    again = model.predict("advection_1d", first.isel(time=-1), steps=1)
    np.testing.assert_array_equal(again["beta"], [0.1, 0.2, 0.3])
    assert (model.predict("advection_1d", first.isel(time=-1), steps=1, beta=0.7)["beta"] == 0.7).all()


def test_labels_of_trajectories_must_agree(model: Model):
    """Values in another order would belong to other trajectories, which the labels say."""
    u_0 = xr.DataArray(U_0[:, 0], dims=("run", "x"), coords={"run": [3, 5, 7]})
    beta = xr.DataArray([0.1, 0.2, 0.3], dims="run", coords={"run": [5, 3, 7]})
    with pytest.raises(ConfigFault, match="beta has other labels along run.*: use beta.sel"):
        model.predict("advection_1d", u_0, steps=1, beta=beta)
    found = model.predict("advection_1d", u_0, steps=1, beta=beta.sel(run=u_0.run))
    np.testing.assert_array_equal(found["beta"], [0.2, 0.1, 0.3])


def test_labels_are_the_parameters_that_were_used(model: Model):
    """Whatever the coordinate of a dimension of trajectories that has the name of a parameter."""
    given = xr.DataArray(U_0[:, 0], dims=("beta", "x"), coords={"beta": [1.0, 2.0, 3.0]})
    found = model.predict("advection_1d", given, steps=1)
    used = model.describe("advection_1d").parameters["beta"][0]
    assert found["u"].dims == ("beta", "time", "x") and found["beta"].values.tolist() == [used] * 3


@pytest.mark.parametrize("convert", [np.int64, np.array, torch.tensor])
def test_whole_numbers_of_any_type_are_taken(model: Model, convert: Callable[[int], Any]):
    """For steps, members and seed."""
    expected = model.predict("advection_1d", U_0, steps=2, members=2, seed=3)
    found = model.predict("advection_1d", U_0, steps=convert(2), members=convert(2), seed=convert(3))
    np.testing.assert_array_equal(found.members, expected.members)
    assert len(list(model.rollout("advection_1d", U_0, steps=convert(2)))) == 2


@pytest.mark.parametrize("family", ["advection_1d", "compressible_ns_1d", "darcy_2d"])
def test_an_ensemble_has_statistics_over_its_members(model: Model, family: str):
    """Mean, deviation and quantiles are NumPy's, for every kind of array; the seed gives the same members again."""
    u_0, options = CASES[family]
    ensemble = model.predict(family, u_0, members=6, seed=3, **options)
    members = ensemble.members
    assert members.shape == (6, *model.predict(family, u_0, **options).shape) and members.std(0).max() > 0
    again, other = (model.predict(family, u_0, members=6, seed=seed, **options).members for seed in (3, 4))
    assert np.array_equal(members, again) and not np.array_equal(members, other)
    np.testing.assert_array_equal(ensemble.mean, members.mean(0))
    np.testing.assert_array_equal(ensemble.std, members.std(0))
    tensors = {name: torch.as_tensor(v) if isinstance(v, np.ndarray) else v for name, v in options.items()}
    of_tensors = model.predict(family, None if u_0 is None else torch.from_numpy(u_0), members=6, seed=3, **tensors)
    labelled = model.predict(family, u_0, members=6, seed=3, labels=True, **options)
    first = next(iter(labelled.members))
    for q in (0.0, 0.1, 0.5, 0.77, 1.0):
        expected = np.quantile(members, q, axis=0)
        np.testing.assert_allclose(ensemble.quantile(q), expected, rtol=1e-6)
        np.testing.assert_allclose(of_tensors.quantile(q), expected, rtol=1e-5, atol=1e-6)
        own = expected if family != "compressible_ns_1d" else expected[:, :, 0]
        np.testing.assert_allclose(labelled.quantile(q)[first], own.reshape(labelled.mean[first].shape), rtol=1e-5)
    np.testing.assert_allclose(of_tensors.std, ensemble.std, rtol=1e-4, atol=1e-6)


def test_statistics_of_members_that_are_not_finite_are_those_of_numpy():
    """NaN where a member is NaN, for every kind of array."""
    members = np.array([[1.0, 1.0], [2.0, 2.0], [np.nan, 3.0], [4.0, 4.0]], np.float32)
    expected = [members.mean(0), members.std(0), *np.quantile(members, (0.0, 0.5), axis=0)]
    assert np.isnan(expected)[:, 0].all() and not np.isnan(expected)[:, 1].any()
    for given in (members, torch.from_numpy(members), xr.DataArray(members, dims=("member", "x"))):
        ensemble = Ensemble(given)
        found = [ensemble.mean, ensemble.std, ensemble.quantile(0.0), ensemble.quantile(0.5)]
        np.testing.assert_allclose(np.stack([np.asarray(each) for each in found]), expected, rtol=1e-6)


@pytest.mark.parametrize("grid", [(8,), (16,), (13,), (5,), (64,)])
def test_every_grid_is_served(model: Model, grid: tuple[int, ...]):
    """Fields are resampled to the trained grid, and the result back."""
    u = model.predict("advection_1d", values(*grid), steps=2, labels=True)
    assert u["u"].shape == (3, *grid) and float(u["x"][-1]) == pytest.approx(1 - 0.5 / grid[0])


def test_what_a_family_is_can_be_asked(model: Model):
    """Fields, grid, time step, values of training, trajectories of the splits, whether ensembles can be had."""
    found = model.describe("burgers_1d")
    assert found.fields.keys() == {"u"} and found.grid == (8,) and found.time_steps == (0.25,)
    assert found.parameters == {"nu": (0.01, 0.1)} and sum(found.trajectories.values()) == 10
    assert not found.ensembles and model.describe("darcy_2d").ensembles and found.scores == {}
    assert "trained at 0.01, 0.1" in repr(found) and "| grid | 8 points on length 1 |" in found._repr_markdown_()
    assert model.describe("darcy_2d").coefficients.keys() == {"nu"} and model.describe("darcy_2d").time_steps == ()


def test_scores_are_those_of_methods_that_are_on(altered: Callable[[Callable[[Any], None]], Model]):
    """A corrector that is off predicts what the operator predicts, and has no row of its own."""
    record = {"metric": "nRMSE", "horizon": "rollout", "value": 0.5}
    records = [record | {"method": "operator"}, record | {"method": "diffusion", "mode": "off"}]
    found = altered(lambda card: card["families"]["burgers_1d"].update(scores=records)).describe("burgers_1d")
    assert found.scores == {("operator", "nRMSE", "rollout"): 0.5}


@pytest.mark.parametrize(
    "given",
    [
        values(16),
        values(16).tolist(),
        values(1, 16),
        values(2, 1, 16),
        torch.ones(16),
        xr.Dataset({"u": ("x", values(16))}),
    ],
)
def test_the_grid_chooses_the_variant(altered: Callable[..., Model], given: Any):
    """Whatever the kind of the array, and whether it has trajectories and fields."""
    assert find_family("advection_1d", altered(two_variants).cards, given) == "advection_1d-16"


def steady_variants(card: Any) -> None:
    """Let the models know two grids of Darcy flow."""
    small = card["families"].pop("darcy_2d")
    grown = small | {"datasets": [entry | {"grid": [16, 12]} for entry in small["datasets"]]}
    card["families"] |= {"darcy_2d-8": small, "darcy_2d-16": grown}


@pytest.mark.parametrize("names", [("nu", "beta"), ("beta", "nu")])
def test_the_grid_of_a_coefficient_chooses_the_variant(altered: Callable[..., Model], names: tuple[str, str]):
    """Of a steady family, whichever of its arguments comes first."""
    given = {"nu": values(16, 12), "beta": 1.0}
    found = altered(steady_variants).pose("darcy_2d", None, None, {name: given[name] for name in names})
    assert found.card.name == "darcy_2d-16"


def test_predictions_have_the_errors_that_the_run_recorded(model: Model, data_root: Path, tmp_path: Path):
    """One step and rollout of every test trajectory, from arrays: nRMSE is that of metrics.json."""
    trained = Trained(
        receipt(data_root, "latent_cache"), {stage: receipt(data_root, stage) for stage in STAGE_NAMES}, data_root
    )
    config = EvaluationConfig(
        folder=None, folder_correctors=True, keep_predictions=[], seed=0, batch_tokens=4096, ensemble_size=4
    )
    records = score_test_split(tmp_path, trained, config, launched(num_processes=1), data_root / "01_raw")["records"]
    plain = [r for r in records if r["method"] in ("operator", "steady") and r["metric"] == "nRMSE"]
    assert len(plain) == 2 * 7
    receipt_of_cache = receipt(data_root, "latent_cache")
    cache = LatentCache.open(place_of(data_root, receipt_of_cache), receipt_of_cache["key"])
    for record in plain:
        entry = cache.datasets[record["dataset"]]
        errors = [rollout_error(model, data_root / "01_raw", entry, i, record) for i in entry["split"]["test"]]
        np.testing.assert_allclose(errors, record["trajectories"], rtol=1e-4)


def rollout_error(model: Model, raw: Path, entry: dict[str, Any], index: int, record: dict[str, Any]) -> float:
    """The mean nRMSE of one test trajectory, of predictions from its arrays."""
    dataset = Dataset.from_json(entry["dataset"])
    with TrajectoryReader(raw, dataset) as reader:
        u_ref, coefficients = reader.read(index), reader.read_coefficients(index)
    named = dict(zip(reader.family.coefficients, coefficients, strict=True)) | dataset.parameters
    if reader.family.steady:
        u = model.predict(dataset.family, **named)[None, None]
    elif record["horizon"] == "rollout":
        u, u_ref = model.predict(dataset.family, u_ref[0], steps=len(u_ref) - 1, **named)[1:], u_ref[1:]
    else:
        starts = {name: np.stack([field] * (len(u_ref) - 1)) for name, field in named.items() if np.ndim(field)}
        if model.describe(dataset.family).history:
            starts["u_before"] = np.concatenate([u_ref[:1], u_ref[:-2]])
        u = model.predict(dataset.family, u_ref[:-1], steps=1, **named | starts)[:, 1]
        u_ref = u_ref[1:]
    return nRMSE(torch.from_numpy(u)[None], torch.from_numpy(u_ref)[None]).mean().item()


def test_a_prediction_outside_of_training_warns(data_root: Path, altered: Callable[..., Model]):
    """Of families with and without parameters, a state far larger than those of training, and one parameter of two."""
    coverage = measure(data_root)

    def cover(card: dict[str, Any]) -> None:
        for name, entry in card["families"].items():
            entry["coverage"] = coverage[name]

    covered = altered(cover)
    with pytest.warns(OutsideTraining, match="advection_1d outside of training: .*amplitude of u is"):
        covered.predict("advection_1d", 1e6 * values(8), steps=1)
    with pytest.warns(OutsideTraining, match="diffusion_reaction_2d outside of training, 2 of 2 states: "):
        covered.predict("diffusion_reaction_2d", 1e6 * values(2, 2, 8, 6), steps=1)
    with pytest.warns(OutsideTraining, match=r"burgers_1d .*nu = 1e\+30 is outside the trained range 0.01 to 0.1"):
        covered.predict("burgers_1d", values(2, 1, 8), steps=1, nu=[0.01, 1e30])
