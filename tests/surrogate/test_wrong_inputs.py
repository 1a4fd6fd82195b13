"""Whatever a caller can get wrong ends in one line that says what is expected and what was found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from ups.data.families import Dataset, Family
from ups.errors import ConfigFault, DataFault
from ups.models.sizes import Domain
from ups.surrogate.family_cards import FamilyCard
from ups.surrogate.model import Model, load
from ups.surrogate.problem import pose

STEPS = {"steps": 2}


def values(*shape: int) -> np.ndarray:
    """Numbers in [0.5, 1.5)."""
    return np.random.default_rng(0).uniform(0.5, 1.5, shape).astype(np.float32)


U = values(8)
NAN = np.where(np.arange(8) == 3, np.nan, U)
FIELD = xr.DataArray(U, dims="x")
FORCE = {"force_x": values(8, 6), "force_y": values(8, 6)}
TWO = values(2, 8, 6)

FAMILY = {
    "misspelt": ("advection1d", U, STEPS, r"'advection1d', only on advection_1d, .*; did you mean advection_1d\?"),
    "untrained": ("kdv_1d", U, STEPS, "not trained on 'kdv_1d', only on advection_1d, burgers_1d"),
    "number": (3, U, STEPS, "not trained on 3, only on"),
    "nothing": (None, U, STEPS, "not trained on None, only on"),
    "list": (["advection_1d"], U, STEPS, r"not trained on \['advection_1d'\], only on"),
}
STATE = {
    "missing": ("advection_1d", None, STEPS, r"u_0 is missing: the initial state of advection_1d \(u\)"),
    "text": ("advection_1d", "u.npy", STEPS, "u_0 must hold real numbers, not <U5"),
    "texts": ("advection_1d", ["1"] * 8, STEPS, "u_0 must hold real numbers, not <U1"),
    "rows of two lengths": ("advection_1d", [[1, 2], [3]], STEPS, "u_0 must be an array, not a list of rows"),
    "object": ("advection_1d", object(), STEPS, "u_0 must hold real numbers, not object"),
    "dates": ("advection_1d", np.zeros(8, "datetime64[s]"), STEPS, "must hold real numbers, not datetime64"),
    "complex": ("advection_1d", U + 1j, STEPS, "must hold real numbers, not complex64"),
    "complex tensor": ("advection_1d", torch.ones(8) + 1j, STEPS, "must hold real numbers, not torch.complex64"),
    "number": ("advection_1d", 1.0, STEPS, r"must be \(1, X\) or \(B, 1, X\) or \(X\), but has shape \(\)"),
    "one point": ("advection_1d", U[:1], STEPS, r"advection_1d has the grid \(1,\): an axis needs at least 2 points"),
    "empty": ("advection_1d", np.zeros(0), STEPS, r"u_0 is empty: its shape is \(1, 1, 0\)"),
    "no trajectory": ("advection_1d", np.zeros((0, 1, 8)), STEPS, r"u_0 is empty: its shape is \(0, 1, 8\)"),
    "batch without fields": ("advection_1d", values(5, 8), STEPS, r"shape \(5, 8\); .* use u_0\[:, None\]"),
    "too many axes": ("advection_1d", values(1, 1, 1, 8), STEPS, r"but has shape \(1, 1, 1, 8\)"),
    "NaN": (
        "advection_1d",
        NAN,
        STEPS,
        r"u_0 has 1 of 8 values that are NaN, infinite .*, the first at \[0, 0, 3\] of shape \[1, 1, 8\]",
    ),
    "NaN in a tensor": ("advection_1d", torch.from_numpy(NAN), STEPS, "u_0 has 1 of 8 values that are NaN"),
    "infinite": ("advection_1d", U * np.inf, STEPS, "u_0 has 8 of 8 values that are NaN, infinite"),
    "too large": ("advection_1d", U.astype(float) * 1e300, STEPS, "8 of 8 values .* too large for float32"),
    "sparse": ("advection_1d", torch.from_numpy(U).to_sparse(), STEPS, r"a dense tensor: use u_0.to_dense\(\)"),
    "masked": ("advection_1d", np.ma.masked_array(U, U > 1), STEPS, "u_0 has masked values"),
    "one of two fields": ("diffusion_reaction_2d", TWO[:1], STEPS, r"\(u, v\) must be \(2, X, Y\) .* \(1, 8, 6\)"),
    "fields last": ("diffusion_reaction_2d", values(8, 6, 2), STEPS, r"must be \(2, X, Y\) .* shape \(8, 6, 2\)"),
    "no field": ("diffusion_reaction_2d", values(8, 6), STEPS, r"must be \(2, X, Y\) .* shape \(8, 6\)"),
    "negative density": ("compressible_ns_1d", values(3, 8) - 1, STEPS, r"density .* must be > 0; .* -0\.\d+"),
    "of a steady family": ("darcy_2d", values(8, 6), {}, "darcy_2d is steady and has no initial state: give nu"),
}
TIME = {
    "no steps": ("advection_1d", U, {}, "steps of advection_1d must be a whole number of at least 1, not None"),
    "zero steps": ("advection_1d", U, {"steps": 0}, "whole number of at least 1, not 0"),
    "steps back": ("advection_1d", U, {"steps": -1}, "whole number of at least 1, not -1"),
    "half a step": ("advection_1d", U, {"steps": 1.5}, "whole number of at least 1, not 1.5"),
    "steps as text": ("advection_1d", U, {"steps": "3"}, "whole number of at least 1, not '3'"),
    "steps as truth": ("advection_1d", U, {"steps": True}, "whole number of at least 1, not True"),
    "steps as truth in a tensor": ("advection_1d", U, {"steps": torch.tensor(True)}, "at least 1, not tensor"),
    "steps as a real tensor": ("advection_1d", U, {"steps": torch.tensor(1.0)}, "at least 1, not tensor"),
    "half of dt": ("advection_1d", U, STEPS | {"dt": 0.125}, "dt = 0.125 of advection_1d must be 0.25, .* multiple"),
    "dt zero": ("advection_1d", U, STEPS | {"dt": 0}, "dt = 0 of advection_1d must be 0.25"),
    "dt back": ("advection_1d", U, STEPS | {"dt": -0.25}, "dt = -0.25 of advection_1d must be 0.25"),
    "dt as text": ("advection_1d", U, STEPS | {"dt": "0.25"}, "dt of advection_1d must be a number, .* not '0.25'"),
    "dt NaN": ("advection_1d", U, STEPS | {"dt": np.nan}, "dt of advection_1d must be a number, .* not nan"),
    "dt infinite": ("advection_1d", U, STEPS | {"dt": np.inf}, "dt of advection_1d must be a number, .* not inf"),
    "huge dt": ("advection_1d", U, STEPS | {"dt": 1e308}, "dt of advection_1d must be a number, 0.25 or a multiple"),
    "list of dt": ("advection_1d", U, STEPS | {"dt": [0.25]}, r"must be a number, .* not \[0.25\]"),
    "steady steps": ("darcy_2d", None, {"nu": TWO[0], **STEPS}, "darcy_2d is steady and has no time steps"),
    "steady dt": ("darcy_2d", None, {"nu": TWO[0], "dt": 0.1}, "darcy_2d is steady and has no time step: leave out dt"),
}
PARAMETERS = {
    "missing": ("burgers_1d", U, STEPS, "nu of burgers_1d is missing: give it by name, as nu=..."),
    "misspelt": ("burgers_1d", U, STEPS | {"nuu": 0.1}, r"burgers_1d has no parameter 'nuu', did you mean nu\?"),
    "unknown": ("burgers_1d", U, STEPS | {"rho": 0.1}, "burgers_1d has no parameter 'rho'; known: nu"),
    "of none": ("diffusion_reaction_2d", TWO, STEPS | {"nu": 0.1}, "has no parameter 'nu'; known: none"),
    "nothing": ("burgers_1d", U, STEPS | {"nu": None}, "nu must hold real numbers, not object"),
    "text": ("burgers_1d", U, STEPS | {"nu": "0.1"}, "nu must hold real numbers, not <U3"),
    "complex": ("burgers_1d", U, STEPS | {"nu": 1j}, "nu must hold real numbers, not complex128"),
    "NaN": ("burgers_1d", U, STEPS | {"nu": np.nan}, "nu has 1 of 1 values that are NaN"),
    "too large": ("burgers_1d", U, STEPS | {"nu": 1e300}, "nu has 1 of 1 values .* too large for float32"),
    "two of three": ("burgers_1d", values(3, 1, 8), STEPS | {"nu": [0.1, 0.2]}, r"one for each of 3 .* shape \(2,\)"),
    "a field": ("burgers_1d", values(3, 1, 8), STEPS | {"nu": values(3, 1)}, r"one for each of 3 .* shape \(3, 1\)"),
    "none given": ("burgers_1d", values(3, 1, 8), STEPS | {"nu": []}, r"one for each of 3 .* shape \(0,\)"),
}
COEFFICIENTS = {
    "missing": ("darcy_2d", None, {}, "nu of darcy_2d is missing: give it by name, as nu=..."),
    "two missing": ("incompressible_ns_2d", values(3, 8, 6), STEPS, "force_x, force_y of .* is missing"),
    "number": ("darcy_2d", None, {"nu": 0.1}, r"nu must be \(X, Y\) or \(B, X, Y\), but has shape \(\)"),
    "too few axes": ("darcy_2d", None, {"nu": U}, r"nu must be \(X, Y\) or \(B, X, Y\), but has shape \(8,\)"),
    "too many axes": ("darcy_2d", None, {"nu": values(1, 1, 8, 6)}, r"but has shape \(1, 1, 8, 6\)"),
    "negative": ("darcy_2d", None, {"nu": -values(8, 6)}, r"nu must be > 0; its smallest value is -1\.\d+"),
    "NaN": ("darcy_2d", None, {"nu": values(8, 6) * np.nan}, "nu has 48 of 48 values that are NaN"),
    "text": ("darcy_2d", None, {"nu": "a"}, "nu must hold real numbers, not <U1"),
    "other grid": (
        "incompressible_ns_2d",
        values(3, 8, 8),
        STEPS | FORCE,
        r"must be on the same grid, not on .*\(8, [68]\) and \(8, [68]\)",
    ),
    "two for three": (
        "incompressible_ns_2d",
        values(3, 3, 8, 6),
        STEPS | {name: values(2, 8, 6) for name in FORCE},
        "must be given once or for each of 3 initial states",
    ),
}
LABELLED = {
    "other axis": ("advection_1d", FIELD.rename(x="z"), STEPS, "must have the dimensions x .*, not z"),
    "two more axes": ("advection_1d", FIELD.expand_dims(a=2, b=2), STEPS, "the dimensions x .*, not a, b, x"),
    "snapshots": ("advection_1d", FIELD.expand_dims(time=2), STEPS, r"dimension time: select one, as u_0.isel\(time=0"),
    "dimension like a field": (
        "advection_1d",
        FIELD.expand_dims(u=2),
        STEPS,
        r"dimension u: select one, as u_0.isel\(u=0\), or rename the dimension",
    ),
    "coefficient's dimension like a field": (
        "darcy_2d",
        None,
        {"nu": xr.DataArray(TWO, dims=("u", "x", "y"))},
        "nu of darcy_2d must not have the dimension u: .* rename the dimension",
    ),
    "text": ("advection_1d", xr.DataArray(["a"] * 8, dims="x"), STEPS, "must hold real numbers, not <U1"),
    "axis downwards": (
        "advection_1d",
        FIELD.assign_coords(x=np.arange(8)[::-1]),
        STEPS,
        r"u_0: the coordinates x do not increase in equal steps: use u_0.sortby\('x'\), or interpolate",
    ),
    "axis in other steps": (
        "darcy_2d",
        None,
        {"nu": xr.DataArray(TWO[0], dims=("x", "y"), coords={"y": np.arange(6) ** 2})},
        r"nu: the coordinates y do not increase in equal steps",
    ),
    "levels like parameters": (
        "burgers_1d",
        FIELD.expand_dims(nu=[0.1, 0.2], seed=[1, 2]).stack(case=("nu", "seed")),
        STEPS | {"nu": 0.1},
        r"multi-index case has the level nu, as a parameter of burgers_1d .* u_0.reset_index\('case', drop=True\)",
    ),
    "no variable": ("advection_1d", xr.Dataset(), STEPS, "has no variable u; it has none"),
    "other variable": ("diffusion_reaction_2d", xr.Dataset({"q": FIELD}), STEPS, "has no variable u, v; it has q"),
    "one array": ("diffusion_reaction_2d", FIELD.expand_dims(y=6), STEPS, r"dimension `field` of size 2 \(u, v\)"),
    "two shapes": (
        "diffusion_reaction_2d",
        xr.Dataset({"u": FIELD.expand_dims(y=6), "v": FIELD.expand_dims(y=6, b=2)}),
        STEPS,
        "all of u, v must have the same dimensions",
    ),
    "other fields": (
        "diffusion_reaction_2d",
        xr.DataArray(values(2, 8, 6), dims=("field", "x", "y"), coords={"field": ["u", "w"]}),
        STEPS,
        "has the fields u, w, expected u, v",
    ),
    "two fields for one": ("advection_1d", FIELD.expand_dims(field=2), STEPS, r"dimension `field` of size 1 \(u\)"),
    "coefficient axis": ("darcy_2d", None, {"nu": FIELD}, "nu of darcy_2d must have the dimensions x, y .*, not x"),
    "coefficient dataset": ("darcy_2d", None, {"nu": xr.Dataset({"nu": FIELD})}, "must be a DataArray, not a Dataset"),
}
ENSEMBLES = {
    "one": ("advection_1d", U, STEPS | {"members": 1}, "an even number of at least 2, not 1"),
    "odd": ("advection_1d", U, STEPS | {"members": 3}, "an even number of at least 2, not 3"),
    "none": ("advection_1d", U, STEPS | {"members": 0}, "an even number of at least 2, not 0"),
    "no whole number": ("advection_1d", U, STEPS | {"members": 2.0}, "an even number of at least 2, not 2.0"),
    "text": ("advection_1d", U, STEPS | {"members": "2"}, "an even number of at least 2, not '2'"),
    "corrector off": (
        "incompressible_ns_2d",
        values(3, 8, 6),
        STEPS | FORCE | {"members": 2},
        "no ensembles of incompressible_ns_2d: .*; leave out members, or choose advection_1d, compressible_ns_1d",
    ),
    "seed as text": ("advection_1d", U, STEPS | {"members": 2, "seed": "a"}, "seed must be a whole number .* not 'a'"),
    "seed below 0": ("advection_1d", U, STEPS | {"members": 2, "seed": -1}, "seed must be a whole number .* not -1"),
}
CASES = {
    f"{topic.lower()}: {name}": case
    for topic in ("FAMILY", "STATE", "TIME", "PARAMETERS", "COEFFICIENTS", "LABELLED", "ENSEMBLES")
    for name, case in globals()[topic].items()
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_wrong_input_is_one_line(model: Model, case: tuple[Any, Any, dict[str, Any], str]):
    """A `ConfigFault` of one line says what is expected and what was found."""
    family, u_0, options, message = case
    with pytest.raises(ConfigFault, match=message) as caught:
        model.predict(family, u_0, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "shape", "u_before", "message"),
    [
        ("diffusion_reaction_2d", (2, 8, 6), np.ones((3, 2, 8, 6)), "u_before of .* must have the shape of u_0"),
        ("diffusion_reaction_2d", (2, 8, 6), np.ones((1, 8, 6)), r"u_before of .* must be \(2, X, Y\)"),
        ("diffusion_reaction_2d", (2, 8, 6), np.full((2, 8, 6), np.nan), "u_before"),
        ("advection_1d", (8,), np.ones(8), "steps of advection_1d start from one snapshot: leave out u_before"),
    ],
)
def test_a_wrong_snapshot_before_is_refused(model: Model, family: str, shape: tuple, u_before: Any, message: str):
    """It has the shape of the initial state, and a family whose steps start from two."""
    with pytest.raises(ConfigFault, match=message):
        model.predict(family, np.ones(shape, np.float32), u_before=u_before, steps=1)


@pytest.mark.parametrize(
    ("family", "u_0", "options", "message"),
    [
        ("advection_1d", U, {"steps": 0}, "at least 1, not 0"),
        ("advection_1d", None, {"steps": 1}, "u_0 is missing"),
        ("darcy_2d", None, {"steps": None, "nu": TWO[0]}, "darcy_2d is steady and has no snapshots: use predict"),
    ],
)
def test_a_rollout_is_refused_before_its_first_snapshot(model: Model, family, u_0, options, message: str):
    """The call itself fails, not the loop over its snapshots."""
    with pytest.raises(ConfigFault, match=message):
        model.rollout(family, u_0, **options)


POISSON = Family("poisson_2d", "a u = f", ["u"], ["x", "y"], "dirichlet", [], coefficients=["a", "f"], steady=True)


@pytest.fixture
def poisson() -> FamilyCard:
    """A steady family with two coefficient fields, as a card has it."""
    dataset = Dataset("poisson", POISSON.name, (), (1,), (0.0,), (8, 6), (1.0, 1.0), POISSON.boundaries, {})
    return FamilyCard(POISSON.name, POISSON, (dataset,), Domain(POISSON.name, (4, 3), (False, False)))


@pytest.mark.parametrize("shape", [(8, 6), (1, 8, 6)])
@pytest.mark.parametrize("names", ["af", "fa"])
def test_one_coefficient_holds_for_all_of_another(poisson: FamilyCard, names: str, shape: tuple[int, ...]):
    """Whichever comes first: there is a solution for each."""
    one, all_ = values(*shape), values(3, 8, 6)
    problem = pose(poisson, None, dict(zip(names, (one, all_), strict=True)), None, torch.device("cpu"))
    assert problem.form.batched and problem.coefficients is not None
    found = problem.coefficients[:, [POISSON.coefficients.index(name) for name in names]]
    np.testing.assert_array_equal(found, np.stack([np.broadcast_to(one, all_.shape), all_], 1))


def test_results_are_labelled_as_the_coefficient_of_most_solutions(poisson: FamilyCard):
    """Not as one that holds for all of them."""
    one = xr.DataArray(values(1, 8, 6), dims=("sample", "x", "y"), coords={"sample": [7]})
    runs = xr.DataArray(values(3, 8, 6), dims=("run", "x", "y"), coords={"run": [1, 2, 3]})
    for given in ({"a": one, "f": runs}, {"a": one[0], "f": runs}, {"a": runs, "f": one}):
        form = pose(poisson, None, given, None, torch.device("cpu")).form
        assert (form.batch, list(form.coordinates)) == ("run", ["run"])


def test_coefficients_of_two_numbers_of_solutions_are_refused(poisson: FamilyCard):
    """Two fields of one and three of the other make no pairs."""
    with pytest.raises(ConfigFault, match="a, f must be given once or for each of 3 solutions"):
        pose(poisson, None, {"a": values(2, 8, 6), "f": values(3, 8, 6)}, None, torch.device("cpu"))


@pytest.mark.parametrize("q", [-0.1, 1.1, np.nan, [0.1, 0.9], "0.5", None])
def test_a_quantile_is_a_share(model: Model, q: Any):
    """Outside of [0, 1] there is none, for numpy and torch; one is asked for at a time."""
    for u_0 in (U, torch.from_numpy(U)):
        with pytest.raises(ConfigFault, match=r"a share in \[0, 1\], not"):
            model.predict("advection_1d", u_0, members=2, **STEPS).quantile(q)


@pytest.mark.parametrize(
    ("place", "fault", "message"),
    [
        ("nowhere", DataFault, "nowhere is no folder: name a data root or a bundle"),
        ("", DataFault, "holds no trained models: run `kedro run --pipeline full`, or name another folder"),
        (None, ConfigFault, "by its path, not None"),
    ],
)
def test_a_wrong_place_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place, fault, message: str):
    """No folder, an empty folder, no name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fault, match=message):
        load(place)


def test_an_unknown_device_is_one_line(data_root: Path):
    """Its name is in the message, and what to choose."""
    with pytest.raises(ConfigFault, match="there is no device 'gpu7' .* choose cpu, or leave out device"):
        load(data_root, device="gpu7")


def shift_dt(card: Any) -> None:
    """Let the second dataset of Burgers have another time step."""
    card["families"]["burgers_1d"]["datasets"][1]["times"] = [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "dt is missing: .* 0.25 or 0.5"), ({"dt": 0.3}, "dt = 0.3 of burgers_1d must be 0.25 or 0.5")],
)
def test_of_two_time_steps_one_must_be_named(altered: Callable[..., Model], options, message: str):
    """Models that were trained with two need it."""
    with pytest.raises(ConfigFault, match=message):
        altered(shift_dt).predict("burgers_1d", U, nu=0.1, **STEPS, **options)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("burgers_1d", {}, "dt is missing: .* 0.25 or 0.5"),
        ("burgers_1d", {"dt": 0.3}, "dt = 0.3 of burgers_1d must be 0.25 or 0.5"),
        ("darcy_2d", {"dt": 0.25}, "darcy_2d is steady and has no time step: leave out dt"),
        ("diffusion_reaction_2d", {"dt": 0.5}, "start from two snapshots, 0.25 apart: export with this dt"),
    ],
)
def test_a_wrong_time_step_is_not_exported(
    altered: Callable[..., Model], tmp_path: Path, family: str, options: dict[str, float], message: str
):
    """A file takes the time steps that predictions take, of models that start from two snapshots that of training."""
    with pytest.raises(ConfigFault, match=message):
        altered(shift_dt).export(family, tmp_path / "model.pt2", **options)
    assert not list(tmp_path.iterdir())


def two_variants(card: Any) -> None:
    """Let the models know two grids of one family."""
    card["families"] = {f"advection_1d-{name}": card["families"]["advection_1d"] for name in ("8", "16")}
    grown = [entry | {"grid": [16]} for entry in card["families"]["advection_1d-16"]["datasets"]]
    card["families"]["advection_1d-16"] = card["families"]["advection_1d-16"] | {"datasets": grown}


def test_several_models_of_one_family_must_be_named(altered: Callable[..., Model]):
    """If the grid of the initial state is that of none."""
    with pytest.raises(ConfigFault, match="several models of advection_1d: choose advection_1d-8 or advection_1d-16"):
        altered(two_variants).predict("advection_1d", values(12), **STEPS)
