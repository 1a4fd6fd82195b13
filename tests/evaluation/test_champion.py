"""A model replaces the champion only if paired errors say so, and no family pays for it."""

from typing import Any

import pytest
import torch

from ups.errors import DataFault
from ups.evaluation.champion import compare, errors_of


def errors(factors: dict[str, float], count: int = 40, noise: float = 0.02, seed: int = 0) -> dict[str, Any]:
    """Errors of one dataset per family: the same trajectories each time, times a factor, with own noise."""
    base = torch.rand(count, generator=torch.Generator().manual_seed(99), dtype=torch.float64) + 0.1
    own = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {
        f"data of {family}": {
            "family": family,
            "trajectories": family,
            "nRMSE": (factor * base * (noise * own).exp()).tolist(),
        }
        for family, factor in factors.items()
    }


CHAMPION = errors({"advection_1d": 1.0, "darcy_2d": 1.0})


def test_lower_errors_win():
    """10 % lower everywhere: the ratio is 0.9 and its interval narrow, although errors differ by a factor of 10."""
    decision = compare(errors({"advection_1d": 0.9, "darcy_2d": 0.9}, seed=1), CHAMPION, 1.02)
    assert decision.is_better and decision.ratio == pytest.approx(0.9, abs=0.01)
    low, high = decision.interval
    assert 0.88 < low < decision.ratio < high < 0.92


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_equal_or_larger_errors_do_not_win(factor: float):
    """An interval that reaches 1 proves nothing."""
    decision = compare(errors({"advection_1d": factor, "darcy_2d": factor}, seed=1), CHAMPION, 1.02)
    assert not decision.is_better and "not surely better" in decision.reason


def test_no_family_may_pay_for_the_others():
    """Half the error of one family does not make up for 5 % more of another, which is named; 1 % is allowed."""
    decision = compare(errors({"advection_1d": 0.5, "darcy_2d": 1.05}), CHAMPION, 1.02)
    assert not decision.is_better and decision.reason == "it is worse on darcy_2d by 5 %"
    assert compare(errors({"advection_1d": 0.5, "darcy_2d": 1.01}), CHAMPION, 1.02).is_better


def test_a_new_family_is_no_obstacle_a_lost_one_is():
    """The champion's test trajectories count, all of them."""
    more = errors({"advection_1d": 0.9, "darcy_2d": 0.9, "burgers_1d": 5.0}, seed=1)
    assert compare(more, CHAMPION, 1.02).is_better
    decision = compare(errors({"advection_1d": 0.5}), CHAMPION, 1.02)
    assert not decision.is_better and decision.reason.endswith("test trajectories of data of darcy_2d")


def test_errors_of_other_trajectories_are_not_compared():
    """Another split of the same data."""
    new = errors({"advection_1d": 0.5, "darcy_2d": 0.5})
    new["data of darcy_2d"]["trajectories"] = "other"
    assert not compare(new, CHAMPION, 1.02).is_better


def test_a_prediction_that_diverges_does_not_win():
    """One trajectory without a finite error is infinitely worse."""
    new = errors({"advection_1d": 0.5, "darcy_2d": 0.5})
    new["data of advection_1d"]["nRMSE"][3] = None
    assert compare(new, CHAMPION, 1.02).reason == "it is worse on advection_1d by inf %"
    old = errors({"advection_1d": 1.0, "darcy_2d": 1.0})
    old["data of advection_1d"]["nRMSE"][4] = None
    assert compare(new, old, 1.02).reason == "it is worse on advection_1d by inf %"


def test_a_champion_that_diverges_can_be_replaced():
    """Trajectories on which it diverged, alone or with the new model, are no obstacle."""
    old, new = errors({"advection_1d": 1.0, "darcy_2d": 1.0}), errors({"advection_1d": 0.9, "darcy_2d": 0.9}, seed=1)
    old["data of advection_1d"]["nRMSE"][3] = old["data of advection_1d"]["nRMSE"][5] = None
    new["data of advection_1d"]["nRMSE"][5] = None
    decision = compare(new, old, 1.02)
    assert decision.is_better and decision.ratio == pytest.approx(0.9, abs=0.01)


def test_few_trajectories_prove_nothing():
    """Three have no interval."""
    decision = compare(errors({"advection_1d": 0.5}, count=3), errors({"advection_1d": 1.0}, count=3), 1.02)
    assert decision.reason == "3 test trajectories prove nothing: at least 8 are needed"


def card(test: list[int]) -> dict[str, Any]:
    """The families of a card: one dataset of each of two."""
    common = {"grid": [8], "times": [0.0, 1.0], "subsample": {}, "counts": [9], "split": {"test": test}}
    return {
        family: {"datasets": [common | {"name": f"data of {family}", "files": [f"{family}.hdf5"]}]}
        for family in ("advection_1d", "darcy_2d")
    }


def records() -> list[dict[str, Any]]:
    """Scores of several methods, metrics and horizons."""
    return [
        {"dataset": f"data of {family}", "method": method, "metric": metric, "horizon": horizon, "trajectories": [x]}
        for family, methods in {"advection_1d": ("operator", "codec"), "darcy_2d": ("steady", "codec")}.items()
        for x, method in enumerate(methods)
        for metric in ("nRMSE", "MAE")
        for horizon in ("one_step", "rollout")
    ]


def test_errors_are_those_of_rollouts_without_corrector():
    """Of the operator or the steady model."""
    found = errors_of(records(), card([1]), {"advection_1d.hdf5": "a", "darcy_2d.hdf5": "b"})
    assert {name: entry["nRMSE"] for name, entry in found.items()} == {
        "data of advection_1d": [0],
        "data of darcy_2d": [0],
    }


def test_trajectories_are_known_by_their_files_and_numbers():
    """Another split or another content of the file are other trajectories."""
    md5 = {"advection_1d.hdf5": "a", "darcy_2d.hdf5": "b"}
    one, same, split, file = (
        errors_of(records(), card(test), files)["data of advection_1d"]["trajectories"]
        for test, files in (([1], md5), ([1], md5), ([2], md5), ([1], md5 | {"advection_1d.hdf5": "c"}))
    )
    assert one == same and len({one, split, file}) == 3


def test_missing_scores_are_one_line():
    """A dataset that was not scored is named, with the command."""
    with pytest.raises(DataFault, match="no scores of data of darcy_2d: run `kedro run --pipeline evaluation`"):
        errors_of(records()[:8], card([1]), {"advection_1d.hdf5": "a", "darcy_2d.hdf5": "b"})
