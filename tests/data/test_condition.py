"""Condition features: what the models get about a dataset besides its state."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ups.data.definitions import NUM_PARAMETERS
from ups.data.families import BOUNDARIES, NUM_CONDITIONS, PARAMETERS, Dataset, boundary_feature, condition_features
from ups.data.samples import domains

PLAIN = Dataset(
    name="plain",
    family="burgers_1d",
    files=("plain.hdf5",),
    counts=(4,),
    times=(0.0, 0.1, 0.2),
    grid=(64,),
    lengths=(1.0,),
    boundary=("periodic",),
    parameters={},
)


def in_dimensions(dims: int, boundary: str = "periodic") -> Dataset:
    """The same number of points per axis and the same boundary on `dims` axes."""
    return replace(PLAIN, grid=(64,) * dims, lengths=(1.0,) * dims, boundary=(boundary,) * dims)


@pytest.mark.parametrize("parameters", [{}, dict.fromkeys(PARAMETERS, 0.1)])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_length_is_constant(dims: int, parameters: dict[str, float]):
    """Every dataset has as many features as any other."""
    assert len(condition_features(replace(in_dimensions(dims), parameters=parameters))) == NUM_CONDITIONS


def test_features_by_hand():
    """log10 of dt = 0.1 is -1, 64 points are 6 / 4 - 1.5 = 0, nu = 0.01 is -2 / 2, then axis and boundary flags."""
    features = condition_features(replace(PLAIN, parameters={"nu": 0.01}))
    nu = 2 + 2 * PARAMETERS.index("nu")
    axis = 2 + 2 * NUM_PARAMETERS
    expected = dict.fromkeys(range(NUM_CONDITIONS), 0.0)
    expected |= {0: -1.0, 1: 0.0, nu: -1.0, nu + 1: 1.0, axis: 1.0, axis + 1 + BOUNDARIES.index("periodic"): 1.0}
    assert features == pytest.approx(list(expected.values()))


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_the_feature_of_a_boundary_is_the_one_that_it_sets(boundary: str):
    """Of all features that can stand for a boundary of an axis, on three axes, exactly one is 1."""
    features = condition_features(in_dimensions(3, boundary))
    for axis in range(3):
        found = {name: features[boundary_feature(axis, name)] for name in BOUNDARIES}
        assert found == {name: float(name == boundary) for name in BOUNDARIES}


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_parameter_counts(name: str):
    """Two values of a parameter, and its absence, have different features; 1 has the logarithm 0 but is not absent."""
    values = [{}, {name: 1.0}, {name: 0.1}, {name: 1e-8}, {name: 0.0}]
    vectors = [tuple(condition_features(replace(PLAIN, parameters=parameters))) for parameters in values]
    assert len(set(vectors)) == len(values)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_sign_of_a_parameter_counts(name: str):
    """A wave that runs to the left has other features than one that runs to the right."""
    right, left = (condition_features(replace(PLAIN, parameters={name: value})) for value in (0.4, -0.4))
    assert right != left and [abs(value) for value in right] == [abs(value) for value in left]


def test_a_family_is_periodic_only_if_all_its_datasets_are():
    """An axis that is open in one dataset of the family is not periodic in any: one basis serves them all."""
    entries = {
        str(number): {"dataset": {"family": "compressible_ns_2d", "boundary": boundary}, "token_grid": [8, 8]}
        for number, boundary in enumerate((["periodic", "periodic"], ["outflow", "periodic"], ["periodic", "periodic"]))
    }
    assert domains(SimpleNamespace(datasets=entries))["compressible_ns_2d"].periodic == (False, True)


def test_parameters_do_not_mix():
    """The same value for two parameters gives two vectors."""
    vectors = {tuple(condition_features(replace(PLAIN, parameters={name: 0.1}))) for name in PARAMETERS}
    assert len(vectors) == len(PARAMETERS)


def test_time_step_counts():
    """Another time step is another vector, wherever the clock starts."""
    shifted, slower = replace(PLAIN, times=(1.0, 1.1, 1.2)), replace(PLAIN, times=(0.0, 0.2, 0.4))
    assert condition_features(shifted) == pytest.approx(condition_features(PLAIN))
    assert condition_features(slower)[0] > condition_features(PLAIN)[0] + 0.1


def test_steady_dataset_has_no_time_step():
    """A single snapshot has the features of a unit time step."""
    steady, unit = replace(PLAIN, times=(0.0,)), replace(PLAIN, times=(0.0, 1.0))
    assert condition_features(steady) == condition_features(unit)


def test_boundary_and_dimension_count():
    """Every boundary condition in every number of dimensions has its own vector."""
    cases = itertools.product(range(1, 4), BOUNDARIES)
    vectors = {tuple(condition_features(in_dimensions(dims, boundary))) for dims, boundary in cases}
    assert len(vectors) == 3 * len(BOUNDARIES)


def test_boundary_of_each_axis_counts():
    """Walls left and right are not walls above and below."""
    sides, ends = ("wall", "periodic"), ("periodic", "wall")
    vectors = [condition_features(replace(in_dimensions(2), boundary=boundary)) for boundary in (sides, ends)]
    assert vectors[0] != vectors[1]


def test_resolution_counts():
    """Twice the points per axis is a quarter more."""
    finer = replace(PLAIN, grid=(128,))
    assert condition_features(finer)[1] - condition_features(PLAIN)[1] == pytest.approx(0.25)


def test_entries_are_of_order_one():
    """The smallest viscosities and the largest grids stay within the reach of a linear layer."""
    extreme = replace(in_dimensions(3), parameters=dict.fromkeys(PARAMETERS, 1e-8), grid=(1024,) * 3, times=(0, 1e-3))
    assert max(abs(value) for value in condition_features(extreme)) <= 4
