"""Limits of a step by hand."""

import pytest
import torch

from ups.models.sizes import Domain, Sizes
from ups.models.state_statistics import SMALLEST_FLUCTUATION, StateStatistics

DOMAIN = Domain("advection_1d", (4,), (True,))
WAVE = torch.tensor([1.0, -1.0, 1.0, -1.0])[None, :, None]


def statistics(**values: float) -> StateStatistics:
    """Statistics of one field of one component."""
    made = StateStatistics(Sizes(("advection_1d",), (1,), (1,), (1,), (0,), 1))
    for name, value in ({"max_mean": 100.0, "max_fluctuation": 100.0} | values).items():
        getattr(made, name).fill_(value)
    return made


def test_a_field_at_rest_may_start_to_move():
    """A constant field counts as one that fluctuates by a thousandth of what is usual: growth 2 of 3 is 0.006."""
    limited = statistics(max_growth=2.0, fluctuation_rms=3.0).limit_step(WAVE, torch.zeros_like(WAVE), DOMAIN)
    torch.testing.assert_close(limited, 2.0 * 3.0 * SMALLEST_FLUCTUATION * WAVE)


@pytest.mark.parametrize(("max_growth", "max_rms", "rms"), [(3.0, 1.5, 1.5), (1.2, 1.5, 1.2), (3.0, 0.5, 1.0)])
def test_the_stricter_limit_holds(max_growth: float, max_rms: float, rms: float):
    """A fluctuation of 1 that wants to be 5 becomes the smaller of growth and largest, but is not made smaller."""
    limited = statistics(max_growth=max_growth, max_rms=max_rms).limit_step(7.0 + 5.0 * WAVE, 7.0 + WAVE, DOMAIN)
    torch.testing.assert_close(limited, 7.0 + rms * WAVE)
