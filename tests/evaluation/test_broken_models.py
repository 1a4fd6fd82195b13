"""Models that are broken in a known way get the grade and the line that say so, by the gates of `conf/base`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from ups.config.evaluation import JudgeConfig
from ups.data.pdebench import FAMILIES
from ups.evaluation.gates import judge, why_hopeless
from ups.evaluation.predictions import plain_method
from ups.metrics.ensembles import EnsembleErrors, ensemble_errors
from ups.metrics.suite import ScoreSuite, Truth

CONF = Path(__file__).parents[2] / "conf/base/parameters_evaluation.yml"
LIMITS = JudgeConfig.model_validate(yaml.safe_load(CONF.read_text())["judge"])
HORIZONS = ("one_step", "rollout")
WAVE, DEPTH, HEAD = "advection_1d", "shallow_water_2d", "darcy_2d"
NUM_TRAJECTORIES, NUM_STEPS = 10, 8
Prediction = Tensor | tuple[Tensor, Tensor]  # a single one, or members (M, B, T, C, *grid) and their mean


def truth_of(family: str) -> Tensor:
    """Snapshots (B, T + 1, 1, *grid): waves that move, in 2D around a depth of 1.1; the integral is constant."""
    phase = torch.arange(NUM_TRAJECTORIES) * 0.3
    times = torch.arange(1 if FAMILIES[family].steady else NUM_STEPS + 1) * 0.6
    x = torch.arange(16) * 2 * math.pi / 16
    wave = torch.sin(x - times[:, None] - phase[:, None, None])[:, :, None]
    if family == WAVE:
        return wave
    return (1.1 * (family == DEPTH) + wave[..., None]).expand(-1, -1, -1, -1, 16).clone()


@dataclass
class Model:
    """Predictions (B, T, 1, *grid) of every method for each family, and the share of values that limits changed.

    Truth and predictions are scored in units of 1 / `scale`.
    """

    predictions: dict[tuple[str, str], Prediction] = field(default_factory=dict)
    limited: dict[str, float] = field(default_factory=dict)
    scale: float = 1.0

    def records(self) -> list[dict[str, Any]]:
        """Records as the evaluation writes them."""
        return [
            {"family": family, "dataset": family, "method": method, "horizon": horizon} | numbers
            for (family, method), prediction in self.predictions.items()
            for horizon in HORIZONS
            for numbers in self._numbers(family, method, horizon, prediction)
        ]

    def _numbers(self, family: str, method: str, horizon: str, prediction: Prediction) -> list[dict[str, Any]]:
        is_steady, u = FAMILIES[family].steady, self.scale * truth_of(family)
        target, u_0 = u[:, (not is_steady) :], None if is_steady or horizon == "one_step" else u[:, 0]
        conserved, non_negative = [[0], []] if family == WAVE else [[0], [0]]
        suite = ScoreSuite(u.ndim - 3, 5, conserved, 0, non_negative)
        ensemble: EnsembleErrors | None = None
        if isinstance(prediction, tuple):
            ensemble, prediction = ensemble_errors(self.scale * prediction[0], target), prediction[1]
        suite.add(suite.reduce(self.scale * prediction, Truth(target), u_0, ensemble))
        found = [{"metric": name, "value": score.value} for name, score in suite.compute().items()]
        if method == plain_method(family):
            share = self.limited.get(family, 0.0)
            found += [
                {"metric": "limited_steps", "value": float(share > 0)},
                {"metric": "limited_values", "value": share},
            ]
        of_trajectories = {"trajectories": suite.of_trajectories("nRMSE").tolist()}
        mode = {"mode": "sample"} if ensemble is not None else {}
        return [one | mode | (of_trajectories if one["metric"] == "nRMSE" else {}) for one in found]


def noise(like: Tensor, size: float) -> Tensor:
    """Random values of zero mean over space."""
    values = size * torch.randn(like.shape, generator=torch.Generator().manual_seed(0))
    return values - values.mean(dim=tuple(range(3, like.ndim)), keepdim=True)


def good_model() -> Model:
    """Small errors everywhere, a codec and a rounding that lose less, and a calibrated ensemble on the waves."""
    model = Model()
    for family in (WAVE, DEPTH, HEAD):
        u = truth_of(family)
        target = u if FAMILIES[family].steady else u[:, 1:]
        model.predictions[family, plain_method(family)] = target + noise(target, 0.02)
        model.predictions[family, "codec"] = target + noise(target, 0.001)
        model.predictions[family, "rounding"] = target + noise(target, 0.0007)
        if not FAMILIES[family].steady:
            model.predictions[family, "persistence"] = u[:, :-1]
    set_ensemble(model, spread=0.02)
    return model


def set_ensemble(model: Model, spread: float) -> None:
    """Eight members around a mean that misses the truth by 0.02."""
    target = truth_of(WAVE)[:, 1:]
    mean = target + noise(target, 0.02)
    members = mean + spread * torch.randn(8, *mean.shape, generator=torch.Generator().manual_seed(1))
    model.predictions[WAVE, "diffusion"] = (members, mean)


def spoil(family: str, method: str, change: Callable[[Tensor], Tensor]) -> Callable[[Model], None]:
    """Change the predictions of a method."""

    def apply(model: Model) -> None:
        model.predictions[family, method] = change(model.predictions[family, method].clone())

    return apply


def untrain(model: Model) -> None:
    """Noise as large as the truth instead of every prediction, from which nothing was learned."""
    for family in (WAVE, DEPTH, HEAD):
        method = plain_method(family)
        model.predictions[family, method] = 2 * noise(model.predictions[family, method], 1.0)


def lose_late(u: Tensor) -> Tensor:
    """NaN at the last step of one trajectory."""
    u[3, -1] = math.nan
    return u


def cut_below_zero(u: Tensor) -> Tensor:
    """A hole of -1 in a corner, its water spread over the rest."""
    hole = torch.zeros_like(u)
    hole[..., :2, :2] = u[..., :2, :2] + 1
    return u - hole + hole.mean(dim=(-1, -2), keepdim=True)


def drift(u: Tensor) -> Tensor:
    """A wave whose mean rises by a fiftieth of its size in each step."""
    return u + 0.02 * torch.arange(u.shape[1])[None, :, None, None]


BROKEN = {
    "untrained": (untrain, {WAVE, DEPTH, HEAD}, "unusable", "steps_beat_persistence"),
    "one family spoilt": (spoil(DEPTH, "operator", lambda u: -u), {DEPTH}, "unusable", "steps_beat_persistence"),
    "twice too large": (spoil(WAVE, "operator", lambda u: 2 * u), {WAVE}, "unusable", "steps_beat_zero"),
    "twice too large, steady": (spoil(HEAD, "steady", lambda u: 2 * u), {HEAD}, "unusable", "solutions_beat_zero"),
    "NaN late in a rollout": (spoil(WAVE, "operator", lose_late), {WAVE}, "unusable", "rollouts_stay_bounded"),
    "limited everywhere": (lambda m: m.limited.update({DEPTH: 0.9}), {DEPTH}, "unusable", "values_are_free"),
    "limited in most steps": (lambda m: m.limited.update({DEPTH: 0.1}), {DEPTH}, "weak", "steps_are_free"),
    "overconfident": (lambda m: set_ensemble(m, 0.01), {WAVE}, "weak", "diffusion_is_calibrated"),
    "underconfident": (lambda m: set_ensemble(m, 0.05), {WAVE}, "weak", "diffusion_rollouts_are_calibrated"),
    "codec of one component": (spoil(WAVE, "codec", torch.zeros_like), {WAVE}, "unusable", "codec_keeps_fields"),
    "lossy codec": (spoil(WAVE, "codec", lambda u: u + noise(u, 0.01)), {WAVE}, "weak", "codec_floor"),
    "rounded too much": (spoil(WAVE, "rounding", lambda u: u + noise(u, 0.002)), {WAVE}, "weak", "rounding_floor"),
    "coarse solution": (
        spoil(HEAD, "rounding", lambda u: u + noise(u, 0.002)),
        {HEAD},
        "weak",
        "steady_rounding_floor",
    ),
    "conserved integral drifts": (spoil(WAVE, "operator", drift), {WAVE}, "weak", "integrals_are_conserved"),
    "negative depth": (spoil(DEPTH, "operator", cut_below_zero), {DEPTH}, "weak", "fields_stay_positive"),
    "worse than persistence": (
        spoil(WAVE, "operator", lambda _: truth_of(WAVE)[:, :-1].roll(-2, -1)),
        {WAVE},
        "unusable",
        "rollouts_beat_persistence",
    ),
    "worse than zero": (spoil(WAVE, "operator", lambda u: -2 * u), {WAVE}, "unusable", "rollouts_stay_bounded"),
    "inaccurate solution": (spoil(HEAD, "steady", lambda u: 0.4 * u), {HEAD}, "weak", "solutions_are_accurate"),
}


def verdict_of(model: Model, **others: list[dict[str, Any]]) -> dict[str, Any]:
    """The verdict by the gates of `conf/base`."""
    families = {family: FAMILIES[family].steady for family in (WAVE, DEPTH, HEAD)}
    return judge(model.records(), LIMITS.gates, families, **others)


def test_a_good_model_passes():
    """All three datasets are good, and every gate that is not against other models was checked somewhere."""
    verdict = verdict_of(good_model())
    assert verdict["passed"]
    assert {entry["grade"] for entry in verdict["grades"].values()} == {"good"}, verdict["grades"]
    checked = {line["name"] for line in verdict["gates"]}
    others = {gate.name for gate in LIMITS.gates if gate.relative_to in ("baselines", "champion")}
    assert checked | others | {"consistency_is_calibrated", "consistency_rollouts_are_calibrated"} == {
        gate.name for gate in LIMITS.gates
    }


@pytest.mark.parametrize(("spoiling", "datasets", "grade", "line"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_model_is_graded(spoiling: Callable[[Model], None], datasets: set[str], grade: str, line: str):
    """What was broken has the grade and the line that names it; all else stays good; unusable fails the run."""
    model = good_model()
    spoiling(model)
    verdict = verdict_of(model)
    grades = verdict["grades"]
    assert {name for name, entry in grades.items() if entry["grade"] != "good"} == datasets, grades
    assert {grades[name]["grade"] for name in datasets} == {grade}, grades
    assert line in {reason.split(":")[0] for name in datasets for reason in grades[name]["reasons"]}, grades
    assert verdict["passed"] == (grade == "weak")


@pytest.mark.parametrize("spoiling", [lambda _: None, *(row[0] for row in BROKEN.values())], ids=["good", *BROKEN])
def test_units_do_not_matter(spoiling: Callable[[Model], None]):
    """In units a billion times as large every gate has the same outcome, and so has the run."""
    usual, tiny = good_model(), good_model()
    tiny.scale = 1e-9
    for model in (usual, tiny):
        spoiling(model)
    expected, found = verdict_of(usual), verdict_of(tiny)
    assert [line["passed"] for line in found["gates"]] == [line["passed"] for line in expected["gates"]]
    assert found["passed"] == expected["passed"]


@pytest.mark.parametrize(("factor", "passed"), [(1.06, False), (1.04, True), (0.5, True)])
def test_a_regression_fails_the_run(factor: float, passed: bool):
    """Errors 6 % above those of the champion fail the run and make the dataset weak; 4 % and progress pass."""
    champion, model = good_model(), good_model()
    target = truth_of(WAVE)[:, 1:]
    model.predictions[WAVE, "operator"] = target + factor * (model.predictions[WAVE, "operator"] - target)
    verdict = verdict_of(model, champion=champion.records())
    assert verdict["passed"] is passed
    assert verdict["grades"][WAVE]["grade"] == ("good" if passed else "weak")
    assert [reason.split(":")[0] for reason in verdict["grades"][WAVE]["reasons"]] == (
        [] if passed else ["steps_do_not_regress", "rollouts_do_not_regress"]
    )


def test_a_model_behind_the_baselines_is_weak():
    """Rollouts worse than the better of FNO and U-Net make a dataset weak; the run still passes."""
    better = good_model()
    target = truth_of(WAVE)[:, 1:]
    better.predictions = {(WAVE, "fno"): target + noise(target, 0.01), (WAVE, "unet"): target + noise(target, 0.5)}
    verdict = verdict_of(good_model(), baselines=better.records())
    assert verdict["passed"] and verdict["grades"][WAVE]["grade"] == "weak"
    assert verdict["grades"][WAVE]["reasons"][0].startswith("rollouts_match_baselines: ")


def test_only_hopeless_models_stop_early():
    """An untrained model and one that is not finite stop after a few trajectories; one bad family does not stop all."""
    hopeless = {"untrained": True, "NaN late in a rollout": True, "one family spoilt": False, "lossy codec": False}
    for name, expected in hopeless.items():
        model = good_model()
        BROKEN[name][0](model)
        assert bool(why_hopeless(verdict_of(model))) is expected, name
