"""`Model.adapt`: what it refuses, and that the result predicts what it has learned."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from tests.surrogate.test_wrong_inputs import two_variants, values
from ups.data.families import Family
from ups.data.pdebench import FAMILIES
from ups.errors import ConfigFault
from ups.surrogate.model import Model

OWN = Family("wave_adapted", "u_t = c u_x", ["u"], ["x"], "periodic", ["c"])
WRONG = {
    "family": ("kdv", values(3, 4, 8), {}, "there is no family 'kdv': give a ups.Family"),
    "parameter": (
        "advection_1d",
        values(3, 4, 8),
        {"bet": 1.0},
        "advection_1d has no parameter 'bet', did you mean beta",
    ),
    "missing": ("advection_1d", values(3, 4, 8), {}, "beta of advection_1d is missing"),
    "shape": (
        "advection_1d",
        values(8),
        {"beta": 1.0},
        r"u of advection_1d must be \(B, T, 1, x\), but has shape \(8,\)",
    ),
    "NaN": ("advection_1d", values(3, 4, 8) * np.nan, {"beta": 1.0}, "u has 96 of 96 values that are NaN"),
    "steps": ("advection_1d", values(3, 4, 8), {"beta": 1.0, "steps": 0}, "steps of training must be a whole number"),
    "lengths": (OWN, values(3, 4, 8), {"c": 1.0, "dt": 0.1}, "lengths of wave_adapted are missing"),
    "two lengths": (
        "advection_1d",
        values(3, 4, 8),
        {"beta": 1.0, "lengths": (1.0, 2.0)},
        r"lengths of advection_1d must be 1 numbers, along x: \(1.0, 2.0\)",
    ),
    "length 0": (
        "advection_1d",
        values(3, 4, 8),
        {"beta": 1.0, "lengths": 0.0},
        "each of lengths must be one positive number, not 0.0",
    ),
    "dt 0": ("advection_1d", values(3, 4, 8), {"beta": 1.0, "dt": 0.0}, "dt must be one positive number, not 0.0"),
    "dt NaN": ("advection_1d", values(3, 4, 8), {"beta": 1.0, "dt": np.nan}, "dt must be one positive number, not nan"),
    "text": ("advection_1d", values(3, 4, 8), {"beta": "a"}, "beta must be one finite number, not 'a'"),
    "array": ("advection_1d", values(3, 4, 8), {"beta": np.ones(3)}, "beta must be one finite number, not array"),
    "one point": ("advection_1d", values(3, 4, 1), {"beta": 1.0}, "an axis needs at least 2 points"),
    "still": (
        "advection_1d",
        values(3, 1, 8).repeat(4, 1),
        {"beta": 1.0},
        "u of advection_1d: it never changes in time",
    ),
    "list": ("advection_1d", [1.0, 2.0], {"beta": 1.0}, r"u of advection_1d must be .*, but has shape \(2,\)"),
    "dimensions": (
        "advection_1d",
        xr.DataArray(values(3, 4, 8), dims=("trajectory", "t", "x")),
        {"beta": 1.0},
        "must have the dimensions time, x and one of trajectories, not trajectory, t, x: rename",
    ),
    "no trajectories": (
        "advection_1d",
        xr.Dataset({"u": (("time", "x"), values(4, 8))}),
        {"beta": 1.0},
        "must have the dimensions time, x and one of trajectories, not time, x",
    ),
    "axis downwards": (
        "advection_1d",
        xr.DataArray(values(3, 4, 8), dims=("trajectory", "time", "x"), coords={"x": np.arange(8.0)[::-1]}),
        {"beta": 1.0},
        "u: the coordinates x do not increase",
    ),
    "other times": (
        "advection_1d",
        xr.DataArray(values(3, 4, 8), dims=("trajectory", "time", "x"), coords={"time": np.arange(4.0)}),
        {"beta": 1.0},
        r"the times 0, 1, 2, ... of u are not dt = 0.25 apart: give dt",
    ),
    "large": ("advection_1d", values(3, 4, 8) * 1e18, {"beta": 1.0}, "magnitude .*e.18, outside of 1e-12 to 1e.15"),
    "small": ("advection_1d", values(3, 4, 8) * 1e-18, {"beta": 1.0}, "magnitude .*e-18, .*: choose other units"),
    "variable": ("advection_1d", xr.Dataset({"v": ("x", values(8))}), {"beta": 1.0}, "u of .* has no variable u; it"),
    "dt": (OWN, values(3, 4, 8), {"c": 1.0, "lengths": (1.0,)}, "dt of wave_adapted is missing"),
}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Later tests do not know the family of these."""
    yield
    FAMILIES.pop(OWN.name, None)


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_one_line(model: Model, case: tuple[str | Family, np.ndarray, dict[str, Any], str]):
    """Before any training."""
    family, u, arguments, expected = case
    with pytest.raises(ConfigFault, match=expected):
        model.adapt(family, u, **{"steps": 1} | arguments)


@pytest.mark.parametrize(
    ("nu", "message"),
    [
        (np.ones((3, 8, 6)), "nu must be given once or for each of 4 initial states"),
        (np.ones((4, 6, 6)), "must be on the same grid"),
        (-np.ones((4, 8, 6)), "nu must be > 0"),
        (np.full((4, 8, 6), np.nan), "nu has 192 of 192 values that are NaN"),
    ],
    ids=["number", "grid", "negative", "NaN"],
)
def test_a_wrong_coefficient_is_one_line(model: Model, nu: np.ndarray, message: str):
    """Of a steady family."""
    with pytest.raises(ConfigFault, match=message):
        model.adapt("darcy_2d", values(4, 1, 8, 6), steps=1, nu=nu, beta=1.0)


def test_a_family_that_is_defined_again_changes_no_model(model: Model):
    """Two models of equations of one name, with other parameters, serve side by side."""
    first, second = (
        model.adapt(replace(OWN, parameters=(name,)), values(4, 3, 8), steps=1, dt=0.1, lengths=(1.0,), **{name: 1.0})
        for name in ("c", "d")
    )
    for adapted, name in ((first, "c"), (second, "d")):
        assert adapted.describe(OWN.name).parameters == {name: (1.0,)}
        assert np.isfinite(adapted.predict(OWN.name, values(8), steps=1)).all()


def test_a_family_on_other_axes_is_one_line(model: Model):
    """Models of 1D and 2D families have no network for 3D."""
    family = Family("wave_3d", "u_t = u_x", ["u"], ["x", "y", "z"], "periodic", [])
    with pytest.raises(ConfigFault, match="no trained family has 3 axes, as wave_3d has"):
        model.adapt(family, values(4, 3, 8, 8, 8), steps=1, dt=0.1, lengths=(1.0, 1.0, 1.0))
    FAMILIES.pop("wave_3d")


MODES = [torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu", torch.bfloat16)]


@pytest.mark.parametrize("mode", MODES, ids=["no gradients", "inference", "autocast"])
def test_modes_of_torch_change_nothing(model: Model, mode: Callable[[], AbstractContextManager[None]]):
    """Adapting trains all the same, with tensors that were made so, too."""
    with mode():
        u = torch.from_numpy(values(4, 3, 8)) * 1.0
        adapted = model.adapt("advection_1d", u, steps=2, beta=0.7, dt=0.1)
    expected = model.adapt("advection_1d", u.numpy(), steps=2, beta=0.7, dt=0.1)
    first, second = (each.predict("advection_1d", values(8), steps=1) for each in (adapted, expected))
    np.testing.assert_array_equal(first, second)


def test_an_adapted_model_serves_its_family_alone(model: Model):
    """With the parameter and the time step of the new trajectories, and a word on what was gained."""
    adapted = model.adapt("advection_1d", values(4, 3, 8), steps=2, beta=0.7, dt=0.1)
    found = adapted.describe("advection_1d")
    assert adapted.families == ("advection_1d",) and found.parameters == {"beta": (0.7,)}
    assert found.time_steps == (0.1,) and "times that of random weights" in found.adapted
    assert np.isfinite(adapted.predict("advection_1d", values(8), steps=3)).all()


def test_a_family_of_several_grids_is_known_by_the_grid_of_the_trajectories(altered: Callable[..., Model]):
    """As `predict` knows it: neither dt nor lengths are asked for."""
    adapted = altered(two_variants).adapt("advection_1d", values(4, 3, 16), steps=1, beta=0.7)
    assert adapted.families == ("advection_1d-16",)
    with pytest.raises(ConfigFault, match="several models of advection_1d: choose advection_1d-8 or advection_1d-16"):
        altered(two_variants).adapt("advection_1d", values(4, 3, 12), steps=1, beta=0.7)


@pytest.mark.parametrize(
    ("times", "dt"),
    [(np.arange(4.0), 0.25), (np.float32(1e4) + 0.25 * np.arange(4, dtype="f4"), None)],
    ids=["numbers of snapshots beside dt", "float32 far from 0"],
)
def test_times_of_snapshots_may_be_rounded_or_numbers(model: Model, times: np.ndarray, dt: float | None):
    """What is given as dt is the time step; else it is that of training, which the times have."""
    u = xr.DataArray(values(3, 4, 8), dims=("trajectory", "time", "x"), coords={"time": times})
    adapted = model.adapt("advection_1d", u, steps=1, beta=1.0, dt=dt)
    assert adapted.describe("advection_1d").time_steps == (0.25,)


@pytest.mark.parametrize("form", ["array", "dataset"])
def test_labelled_trajectories_are_read_by_their_dimensions(model: Model, form: str):
    """A DataArray and a Dataset, with dimensions and fields in any order, teach what the plain array teaches."""
    u = values(4, 3, 2, 8, 6)
    array = xr.DataArray(u, dims=("run", "time", "field", "x", "y"), coords={"field": ["u", "v"]})
    labelled = array.sel(field=["v", "u"]).transpose("y", "x", "field", "run", "time")
    given = labelled if form == "array" else labelled.to_dataset("field")
    found, expected = (
        model.adapt("diffusion_reaction_2d", each, steps=1, dt=0.1).predict("diffusion_reaction_2d", u[0, 0], steps=2)
        for each in (given, u)
    )
    np.testing.assert_array_equal(found, expected)


def test_labelled_solutions_are_read_by_their_dimensions(model: Model):
    """Of a steady family: no `time`, and every solution counts as a trajectory."""
    u, nu = values(4, 8, 6), values(4, 8, 6)
    labelled = xr.Dataset({"u": (("run", "x", "y"), u)}).transpose("x", "y", "run")
    adapted = model.adapt("darcy_2d", labelled, steps=1, nu=nu, beta=1.0)
    expected = model.adapt("darcy_2d", u, steps=1, nu=nu, beta=1.0)
    assert adapted.describe("darcy_2d").trajectories["train"] == 4
    np.testing.assert_array_equal(adapted.predict("darcy_2d", nu=nu), expected.predict("darcy_2d", nu=nu))
