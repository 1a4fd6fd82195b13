"""What limits change is counted for one method at a time."""

import pytest
import torch
from torch import Tensor

from tests.evaluation.corrected import DOMAIN, FAMILY, make_surrogate, posterior_mean
from ups.diffusion import independent
from ups.evaluation.predictions import Stepper, corrected_stepper
from ups.evaluation.records import LimitCount, summary
from ups.models.sizes import Sizes
from ups.models.state_statistics import StateStatistics
from ups.surrogate.surrogate import Correction, Setting

SETTING = Setting(FAMILY, DOMAIN, torch.zeros(2, 32, 0), torch.zeros(2, 1))


def test_limited_states_are_counted_for_their_method_alone():
    """A limit on the mean of one of two channels changes one, then both of two states; other steps count nothing."""
    surrogate = make_surrogate(posterior_mean(0.0, 1.0))
    surrogate.operator.statistics = StateStatistics(Sizes((FAMILY,), (1,), (2,), (2,), (0,), 1))
    surrogate.operator.statistics.max_mean.copy_(torch.tensor([2.5, 1e6]))

    def add_one(z: Tensor) -> Tensor:
        return surrogate.operator.statistics.limit_step(z + 1, torch.zeros_like(z), DOMAIN)

    count = LimitCount(surrogate, FAMILY, torch.device("cpu"))
    step = count.of(Stepper(lambda _: add_one, 1)).start(SETTING)
    z = torch.tensor([0.0, 1.0])[:, None, None].expand(2, 32, 2)
    for _ in range(3):
        z = step(z)
    assert {name: score.value for name, score in count.scores().items()} == {
        "limited_steps": 0.5,
        "limited_values": 0.25,
    }
    add_one(z)
    assert count.scores()["limited_steps"].value == 0.5


@pytest.mark.parametrize("method", ["diffusion", "consistency"])
@pytest.mark.parametrize(("residual", "share"), [(0.5, 0.0), (2.0, 1.0)])
def test_a_corrected_state_is_counted_once(method: str, residual: float, share: float):
    """From a mean of 8 beyond its limit, halved to 4, residuals of 8 reach 12 and are limited to 8, of 2 are not."""
    surrogate = make_surrogate(lambda x, sigma: torch.ones_like(x), lambda x, sigma: torch.ones_like(x))
    surrogate.operator.statistics.max_mean.fill_(0.0)
    correction, normal = Correction("sample", 80.0, 0.002, 1, residual, 0.0), independent(torch.Generator())
    count = LimitCount(surrogate, FAMILY, torch.device("cpu"))
    step = count.of(corrected_stepper(surrogate, method, correction, 1, normal)).start(SETTING)
    step(torch.full((2, 32, 1), 8.0))
    assert {name: score.value for name, score in count.scores().items()} == {
        "limited_steps": share,
        "limited_values": share,
    }


def test_without_limits_a_state_grows_beyond_them():
    """The limit of 2.5 on the mean holds before and after a step that is made without limits."""
    surrogate = make_surrogate(posterior_mean(0.0, 1.0))
    statistics = surrogate.operator.statistics
    statistics.max_mean.fill_(2.5)
    z = torch.full((2, 32, 1), 2.0)
    stepper = Stepper(lambda _: lambda z: statistics.limit_step(z + 1, torch.zeros_like(z), DOMAIN), 1)
    count = LimitCount(surrogate, FAMILY, torch.device("cpu"))
    free, usual = count.without_limits(stepper).start(SETTING), stepper.start(SETTING)
    assert [step(z).max().item() for step in (usual, free, usual)] == [2.5, 3.0, 2.5]


def test_runs_are_compared_by_few_numbers():
    """Geometric mean of the operator and the steady model, grades and gates missed; nothing of what is off or lost."""
    where = {"metric": "nRMSE", "horizon": "rollout", "family": "burgers_1d"}
    records = [where | {"dataset": "a", "method": "operator", "value": 0.1}]
    records += [where | {"dataset": "a", "method": "diffusion", "value": 0.1, "mode": "off"}]
    records += [where | {"dataset": "b", "method": "fno", "value": None}]
    records += [where | {"dataset": "d", "method": "steady", "value": 0.4, "family": "darcy_2d"}]
    grades = {"a": {"grade": "good"}, "b": {"grade": "weak"}, "d": {"grade": "good"}}
    verdict = {"passed": True, "grades": grades, "gates": [{"passed": True}, {"passed": False}]}
    metrics, tags = summary(records, verdict)
    assert metrics.pop("test/rollout_nRMSE") == pytest.approx(0.2)
    assert metrics == {
        "test/a/operator/rollout/nRMSE": 0.1,
        "test/d/steady/rollout/nRMSE": 0.4,
        "test/datasets_good": 2.0,
        "test/datasets_weak": 1.0,
        "test/datasets_unusable": 0.0,
        "test/gates_missed": 1.0,
    }
    assert tags == {"grade.a": "good", "grade.b": "weak", "grade.d": "good", "verdict": "passed"}
