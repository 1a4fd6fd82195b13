"""What limits change is counted for one method at a time."""

import torch
from torch import Tensor

from tests.evaluation.corrected import DOMAIN, FAMILY, make_surrogate, posterior_mean
from ups.evaluation.predictions import Stepper
from ups.evaluation.records import LimitCount
from ups.surrogate.surrogate import Setting

SETTING = Setting(FAMILY, DOMAIN, torch.zeros(2, 32, 0), torch.zeros(2, 1))


def test_limited_states_are_counted_for_their_method_alone():
    """A limit of 2.5 on the mean changes one, then both of two states that grow; other steps count nothing."""
    surrogate = make_surrogate(posterior_mean(0.0, 1.0))
    surrogate.operator.statistics.max_mean.fill_(2.5)

    def add_one(z: Tensor) -> Tensor:
        return surrogate.operator.statistics.limit_step(z + 1, torch.zeros_like(z), DOMAIN)

    count = LimitCount(surrogate, FAMILY, torch.device("cpu"))
    step = count.of(Stepper(lambda _: add_one, 1)).start(SETTING)
    z = torch.tensor([0.0, 1.0])[:, None, None].expand(2, 32, 1)
    for _ in range(3):
        z = step(z)
    assert {name: score.value for name, score in count.shares().items()} == {
        "limited_steps": 0.5,
        "limited_values": 0.5,
    }
    add_one(z)
    assert count.shares()["limited_steps"].value == 0.5
