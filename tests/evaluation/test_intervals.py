"""The ratio of two methods' errors, with an interval over test trajectories that are resampled for both alike."""

import re

import numpy as np
import pytest

from ups.evaluation.comparison import intervals_text

RNG = np.random.default_rng(0)
HARD = np.exp(RNG.normal(size=24))  # how hard the trajectories are, for every method
CHANCE = np.exp(0.2 * RNG.normal(size=24))


def records(**methods: np.ndarray) -> list[dict]:
    """The same errors of trajectories at both horizons."""
    return [
        {"dataset": "waves", "method": method, "horizon": horizon, "metric": "nRMSE", "trajectories": errors.tolist()}
        for method, errors in methods.items()
        for horizon in ("one_step", "rollout")
    ]


def cells(ours: list[dict], baselines: list[dict]) -> list[str]:
    """The line of the dataset."""
    (line,) = (line for line in intervals_text(ours, baselines).splitlines() if line.startswith("| waves"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def numbers(cell: str) -> list[float]:
    """Ratio, low, high."""
    return [float(found) for found in re.findall(r"[\d.]+", cell)]


def test_a_method_half_as_wrong_everywhere_is_so_in_every_resample():
    """Hard trajectories are hard for both: drawn in pairs they leave the ratio alone."""
    found = cells(records(operator=0.5 * HARD), records(fno=HARD, unet=2 * HARD))
    assert found[1:] == ["24", "0.5 (0.5 to 0.5)", "0.5 (0.5 to 0.5)"]


def test_interval_is_that_of_an_independent_bootstrap():
    """The same quantiles as with numpy's random numbers, up to those of 1,000 resamples."""
    ours, fno = HARD * CHANCE, HARD
    drawn = RNG.integers(24, size=(20000, 24))
    low, high = np.quantile(ours[drawn].mean(1) / fno[drawn].mean(1), [0.025, 0.975])
    value, *ends = numbers(cells(records(operator=ours), records(fno=fno, unet=2 * HARD))[2])
    assert value == pytest.approx(ours.mean() / fno.mean(), rel=5e-3)
    assert ends == pytest.approx([low, high], rel=0.02)
    assert low < value < high


def test_the_better_baseline_is_the_reference():
    """Ours over the U-Net where that is better than the FNO."""
    assert cells(records(operator=HARD), records(fno=9 * HARD, unet=2 * HARD))[2].startswith("0.5 ")


def test_few_trajectories_have_no_interval():
    """Seven resampled say nothing about others."""
    few = HARD[:7]
    assert cells(records(operator=few), records(fno=2 * few, unet=2 * few))[1:] == ["7", "0.5", "0.5"]


def test_what_diverged_has_no_ratio():
    """A trajectory without finite error takes the method out: the other baseline counts, or nothing does."""
    lost = records(fno=HARD)
    lost[0]["trajectories"][3] = None
    assert cells(records(operator=HARD), lost + records(unet=4 * HARD))[2].startswith("0.25 ")
    assert cells(records(operator=HARD), lost)[2] == "not finite"


def test_a_corrector_is_not_ours():
    """Ours is the operator, or the steady model."""
    found = records(steady=HARD, diffusion=0.1 * HARD)
    assert cells(found, records(fno=2 * HARD, unet=2 * HARD))[2].startswith("0.5 ")
