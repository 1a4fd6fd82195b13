"""The table of ensembles: ratios to the operator, and no line where a method is off."""

from tests.evaluation.conftest import unpadded
from ups.evaluation.comparison import uncertainty_text

OPERATOR = {"MAE": 0.4, "nRMSE": 0.2, "band_error_4": 0.5}
ENSEMBLE = {"CRPS": 0.1, "MAE": 0.5, "nRMSE": 0.1, "band_error_4": 0.4, "spread_skill": 0.9, "coverage": 0.6}


def records(dataset: str, family: str = "burgers_1d", **methods: dict[str, float | None]) -> list[dict]:
    """The same scores at both horizons."""
    return [
        {"dataset": dataset, "family": family, "method": method, "horizon": horizon, "metric": metric, "value": value}
        for method, scores in methods.items()
        for horizon in ("one_step", "rollout")
        for metric, value in scores.items()
    ]


def test_an_ensemble_is_beside_the_operator():
    """CRPS over the operator's MAE, two errors over its own, and what needs no reference."""
    lines = unpadded(uncertainty_text(records("waves", operator=OPERATOR, diffusion=ENSEMBLE)))
    assert "| waves | diffusion | one_step | 0.25 | 0.5 | 0.8 | 0.9 | 0.6 |" in lines
    assert sum(line.startswith("| waves") for line in lines) == 2


def test_a_steady_ensemble_is_beside_the_steady_model():
    """In a steady family the steady model is what an ensemble is compared with."""
    lines = unpadded(uncertainty_text(records("flow", "darcy_2d", steady=OPERATOR, diffusion=ENSEMBLE)))
    assert "| flow | diffusion | one_step | 0.25 | 0.5 | 0.8 | 0.9 | 0.6 |" in lines


def test_a_method_that_is_off_has_no_line():
    """Without an ensemble there is no CRPS; other datasets are not concerned."""
    found = records("off", operator=OPERATOR, diffusion=OPERATOR) + records("on", operator=OPERATOR, diffusion=ENSEMBLE)
    text = "\n".join(unpadded(uncertainty_text(found)))
    assert "| off |" not in text and text.count("| on |") == 2


def test_what_diverged_is_said():
    """A score that is not finite is no number."""
    text = uncertainty_text(records("waves", operator=OPERATOR, diffusion=ENSEMBLE | {"CRPS": None}))
    assert "| waves | diffusion | one_step | not finite | 0.5 |" in "\n".join(unpadded(text))
