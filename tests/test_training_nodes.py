"""The stages of the corrector are trained for the families alone for which it may be chosen."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training.jobs import launched, section
from ups.config import CorrectorConfig, EvaluationConfig, JudgeConfig, packaged
from ups.data.latent_cache import LatentCache
from ups.errors import GateFailed
from ups.pipelines import training
from ups.pipelines.reporting import require_pass

RECEIPT = {"path": "", "key": {}, "transient": ["burgers_1d", "advection_1d"], "steady": ["darcy_2d"]}
HOPE = {"gates": [], "grades": {"1D_Burgers": {"grade": "weak"}}}


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`train(minimum)`: what is trained of three families with 4 + 3, 6 and 8 validation trajectories."""
    counts = [("burgers_1d", 4), ("burgers_1d", 3), ("advection_1d", 6), ("darcy_2d", 8)]
    entries = {str(i): {"dataset": {"family": f}, "split": {"valid": [0] * n}} for i, (f, n) in enumerate(counts)}
    monkeypatch.setattr(LatentCache, "open", lambda folder, key: SimpleNamespace(datasets=entries))
    monkeypatch.setattr(training, "train_stage", lambda stage, config, inputs, *_: {"config": config, "inputs": inputs})

    def of(minimum: int, verdict: dict[str, Any] = HOPE) -> dict[str, Any]:
        limits = CorrectorConfig.model_validate(packaged("corrector") | {"min_trajectories": minimum})
        config = section("diffusion", steps=1000, warmup_steps=100)
        return training.train_diffusion(config, limits, verdict, launched(), tmp_path, latent_cache=RECEIPT)

    return of


@pytest.mark.parametrize(
    ("minimum", "transient", "steps", "few"),
    [
        (1, ["burgers_1d", "advection_1d"], (1000, 100), {}),
        (7, ["burgers_1d"], (667, 67), {"advection_1d": 6}),
        (8, [], (334, 34), {"burgers_1d": 7, "advection_1d": 6}),
    ],
)
def test_a_family_without_a_choice_is_not_trained(train, minimum: int, transient: list, steps: tuple, few: dict):
    """Trajectories count over all datasets of a family; what is trained keeps its steps per family."""
    trained = train(minimum)
    cache, config = trained["inputs"]["latent_cache"], trained["config"]
    assert (cache["transient"], cache["steady"]) == (transient, ["darcy_2d"])
    assert (config.steps, config.warmup_steps) == steps
    assert cache["too_few_validation_trajectories"] == few


def test_no_family_with_a_choice_leaves_the_stage_untrained(train):
    """The receipt says why."""
    assert "fewer than 9 validation trajectories" in train(9)["untrained"]


def test_a_hopeless_run_trains_no_corrector(train):
    """Where every dataset is unusable after a few trajectories."""
    verdict = {"gates": [], "grades": {"1D_Burgers": {"grade": "unusable", "reasons": ["worse than nothing"]}}}
    with pytest.raises(GateFailed, match="stopped after a few trajectories: .*worse than nothing"):
        train(1, verdict)


def test_a_run_without_a_gate_says_so(tmp_path: Path):
    """A verdict of nothing is not passed, and the line says what to add."""
    verdict = {"passed": False, "grades": {"a": {"grade": "weak", "reasons": ["no gate applies to it"]}}, "gates": []}
    config, limits = packaged("evaluation"), {"first_trajectories": 1, "gates": []}
    sections = EvaluationConfig.model_validate(config), JudgeConfig.model_validate(limits)
    with pytest.raises(GateFailed, match=r"datasets: 1 weak; none of judge\.gates applies to any of them: add one"):
        require_pass(*sections, verdict, [], {}, "", None, None, None, tmp_path)
