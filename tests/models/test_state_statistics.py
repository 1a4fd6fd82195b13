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
    return made.eval()


def parts_of(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Means over tokens and fluctuations."""
    mean = z.mean(1, keepdim=True)
    return mean, z - mean


def test_a_field_at_rest_may_start_to_move():
    """A constant field counts as one that fluctuates by a thousandth of what is usual: growth 2 of 3 is 0.006."""
    limited = statistics(max_growth=2.0, fluctuation_rms=3.0).limit_step(WAVE, torch.zeros_like(WAVE), DOMAIN)
    torch.testing.assert_close(limited, 2.0 * 3.0 * SMALLEST_FLUCTUATION * WAVE)


@pytest.mark.parametrize(("max_growth", "max_rms", "rms"), [(3.0, 1.5, 1.5), (1.2, 1.5, 1.2), (3.0, 0.5, 1.0)])
def test_the_stricter_limit_holds(max_growth: float, max_rms: float, rms: float):
    """A fluctuation of 1 that wants to be 5 becomes the smaller of growth and largest, but is not made smaller."""
    limited = statistics(max_growth=max_growth, max_rms=max_rms).limit_step(7.0 + 5.0 * WAVE, 7.0 + WAVE, DOMAIN)
    torch.testing.assert_close(limited, 7.0 + rms * WAVE)


def test_changed_states_and_values_are_counted():
    """Of four states one is hardly changed, one is rescaled, one not finite, and one clamped, whose mean stays."""
    made = statistics(max_mean=10.0, max_fluctuation=4.0, max_rms=2.0)
    made.limited = torch.zeros(3)
    peak = torch.tensor([6.0, -1.0, -1.0, -1.0, -1.0, -1.0, 0.0, -1.0])[None, :, None]
    states = torch.cat([peak, *(size * WAVE.repeat(1, 2, 1) for size in (2.005, 3.0, torch.nan))])
    made.limit_step(states, torch.zeros_like(states) + 0.1 * peak, Domain("advection_1d", (8,), (True,)))
    count, steps, values = made.limited.tolist()
    assert (count, steps) == (4, 3) and values == pytest.approx(1 + 1 + 1)
    made.limited = None
    made.limit_solution(states, DOMAIN)
    assert made.limited is None


def test_a_clamped_peak_leaves_the_mean():
    """A peak of 7 and seven values of -1 become 4 and -4/7, whose mean is 0 as well."""
    peak = torch.tensor([7.0, *[-1.0] * 7])[None, :, None]
    limited = statistics(max_fluctuation=4.0).clamp_state(2.0 + peak, Domain("advection_1d", (8,), (True,)))
    torch.testing.assert_close(limited, 2.0 + torch.tensor([4.0, *[-4 / 7] * 7])[None, :, None])


@pytest.mark.parametrize("peak", [1.0, 50.0])
def test_limits_bound_every_later_state(peak: float):
    """Whatever 200 steps want, mean and fluctuation stay within the limits, or those of the initial state if larger."""
    made, domain = statistics(max_mean=1.0, max_fluctuation=2.0), Domain("advection_1d", (8,), (True,))
    generator = torch.Generator().manual_seed(0)
    z = peak * torch.randn(4, 8, 1, generator=generator)
    limits = [max(limit, part.abs().max().item()) for limit, part in zip((1.0, 2.0), parts_of(z), strict=True)]
    for _ in range(200):
        wild = 2.0 * z + torch.randn(4, 8, 1, generator=generator).exp()
        z = made.limit_step(wild, z, domain)
        assert all(part.abs().max() <= 1.0001 * limit for part, limit in zip(parts_of(z), limits, strict=True))


def test_a_limited_solution_is_counted():
    """A steady solution beyond the limit of its mean is clamped to it, and counted as one state of one."""
    made = statistics(max_mean=1.0)
    made.limited = torch.zeros(3)
    torch.testing.assert_close(made.limit_solution(3.0 + WAVE, DOMAIN), 1.0 + WAVE)
    assert made.limited.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("exponent", "expected"), [(1.0, 1.0), (0.5, 0.5), (-0.7, -0.7), (-1.8, -1.0), (2.0, 1.0)])
def test_the_expected_change_follows_a_power_of_the_amplitude(exponent: float, expected: float):
    """Changes of 0.3 a^p: p is found, as far as it is allowed, and in their units changes have a mean square of 1."""
    made, amplitudes = statistics(fluctuation_rms=2.0, step_rms=5.0), torch.linspace(0.3, 5.0, 64)
    z = 2.0 * amplitudes[:, None, None] * WAVE
    steps = (z, z + 0.3 * (amplitudes**exponent)[:, None, None] * WAVE)
    made.fit_change_law([steps], DOMAIN)
    assert made.change_law[0, 1].item() == pytest.approx(expected, abs=0.05)
    changes = (steps[1] - steps[0]) / made.expected_change(z, DOMAIN)
    assert changes.square().mean().item() == pytest.approx(1.0, rel=1e-4)


def test_the_expected_change_grows_with_the_amplitude_where_amplitudes_hardly_vary():
    """A spread of amplitudes of a hundredth says nothing about the exponent, although changes fall steeply with it."""
    made, amplitudes = statistics(), torch.linspace(0.99, 1.01, 32)
    z = amplitudes[:, None, None] * WAVE
    made.fit_change_law([(z, z + (amplitudes**-9)[:, None, None] * WAVE)], DOMAIN)
    assert made.change_law[0, 1].item() == pytest.approx(1.0, abs=0.05)


def test_settled_states_do_not_change_the_law():
    """Changes proportional to the amplitude, and every tenth state at rest; if all are at rest the law is as before."""
    made, amplitudes = statistics(), torch.linspace(0.5, 1.5, 100)
    z = amplitudes[:, None, None] * WAVE
    moving = (torch.arange(100) % 10 < 9).float()[:, None, None]
    made.fit_change_law([(z, (1 + 0.3 * moving) * z)], DOMAIN)
    torch.testing.assert_close(made.change_law[0], torch.tensor([0.3, 1.0]))
    made.fit_change_law([(z, z)], DOMAIN)
    assert made.change_law[0].tolist() == [1.0, 1.0]
