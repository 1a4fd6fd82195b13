"""Statistics of latent states: normalization by a state's own amplitude, and limits that keep every rollout finite."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ups.models.history import History
from ups.models.sizes import Domain, Sizes, row_of

SMALLEST, LARGEST = 0.2, 20.0  # amplitudes
SMALLEST_FLUCTUATION = 1e-3
SMALLEST_CHANGE = 1e-2  # of a limited value, in units of `fluctuation_rms`
UNLIMITED = 1e6
SMALLEST_RATIO = 1e-3  # of a change to `step_rms`: smaller ones are left out of the fit of `expected_change`
EXPONENTS = (-1.0, 1.0)
PRIOR_VARIANCE = 0.01  # of log amplitudes: where they vary less the exponent stays near 1


class StateStatistics(nn.Module):
    """Statistics of the training split per family and latent channel, and functions of a state that use them.

    The fluctuation of a state z (B, N, D) is z minus its mean over the N tokens.

    - `fluctuation_rms`, `step_rms`: RMS of the fluctuation, and of the change of one time step, per field
    - `max_mean`, `max_fluctuation`: largest magnitudes of the mean and of the fluctuation of a predicted state
    - `max_growth`: largest factor by which one step may raise the RMS of the fluctuation, per field
    - `max_rms`: largest RMS of the fluctuation, per field; far below `max_fluctuation` where peaks are rare
    - `field_average` (families, D, D): matrix that averages over the channels of each field
    - `change_law` (families, 2): the factor and the exponent of `expected_change`
    - `validation_error` (families): latest validation loss in units of the expected change, at first 0; scales
      the noise of training, and is the noise that the operator's filter expects

    The amplitude a (B, 1, D) of a state is the RMS of its fluctuation over `fluctuation_rms`, one value per field,
    clamped to [0.2, 20]. Divided by it, decaying and rescaled solutions look alike to a network (reversible instance
    normalization as in McCabe et al. 2023, arXiv:2310.02994, section 4.1).

    `history` says of which families a state is two snapshots; all functions here take the latents of one.

    `limited` (3,), None except while predictions are scored, counts the predicted states, those that a limit has
    changed, and the changed values, as a sum over the states of their share. Of a corrected step it is the corrected
    state that counts. Changes below a hundredth of `fluctuation_rms` do not: a wave whose RMS stays the same is
    rescaled by a little in every step.
    `limits` is False while a model is scored without any limit, on its input and on its prediction.
    """

    limited: Tensor | None = None
    limits = True

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        shape = (len(sizes.families), max(sizes.latent_channels))
        self.rows, self.history = sizes.rows, History(sizes)
        for name in ("fluctuation_rms", "step_rms", "max_mean", "max_fluctuation"):
            self.register_buffer(name, torch.ones(shape))
        for name in ("max_growth", "max_rms"):
            self.register_buffer(name, torch.full(shape, UNLIMITED))
        self.register_buffer("change_law", torch.ones(shape[0], 2))
        self.register_buffer("validation_error", torch.zeros(shape[0]))
        self.register_buffer("field_average", torch.eye(shape[1]).repeat(shape[0], 1, 1))

    def of(self, name: str, domain: Domain, channels: int) -> Tensor:
        """The statistic `name` of the domain's family for its latent channels, (channels,)."""
        return getattr(self, name)[row_of(self.rows, domain.family), :channels]

    def amplitude(self, z: Tensor, domain: Domain) -> Tensor:
        """Amplitude a (B, 1, D) of states z (B, N, D)."""
        rms = self.field_rms(z - z.mean(1, keepdim=True), domain)
        return (rms / self.of("fluctuation_rms", domain, z.shape[-1])).clamp(SMALLEST, LARGEST)

    def field_rms(self, x: Tensor, domain: Domain) -> Tensor:
        """RMS of latents x (B, N, D) over the tokens and the channels of each field, (B, 1, D)."""
        average = self.of("field_average", domain, x.shape[-1])[:, : x.shape[-1]]
        # Not a matrix product: autocast would compute it in bfloat16.
        mean_square = (x.square().mean(1).unsqueeze(-1) * average).sum(1, keepdim=True)
        return mean_square.clamp(min=torch.finfo(x.dtype).tiny).sqrt()  # the square root has no gradient at 0

    def expected_change(self, z: Tensor, domain: Domain) -> Tensor:
        """RMS (B, 1, D) of the change that one step is expected to make, f a^p `step_rms` with the RMS a over fields.

        p is 1 where changes scale with the state, and negative where they fade while a field fills the domain. One
        amplitude for all fields, because they are coupled: velocities change densities.
        """
        amplitude = self.amplitude(z, domain).square().mean(-1, keepdim=True).sqrt()
        factor, exponent = self.change_law[row_of(self.rows, domain.family)]
        return self.of("step_rms", domain, z.shape[-1]) * factor * amplitude**exponent

    def last_change(self, z: Tensor, before: Tensor, domain: Domain) -> Tensor:
        """The change (B, N, D) that led from `before` to z, within the limits, in units of the expected change."""
        return (z - self.clamp_state(before, domain)) / self.expected_change(z, domain)

    @torch.no_grad()
    def fit_change_law(self, steps: Iterable[tuple[Tensor, Tensor]], domain: Domain) -> None:
        """Fit f and p to time steps z -> z_next, each (B, N, D): least squares in the logarithms of a and change.

        Settled states, with changes below a thousandth of `step_rms`, are left out; without others f = p = 1. Where
        amplitudes hardly vary p stays near 1. It is at most 1: a larger one, where quadratic terms have it, makes
        states that hardly change count too much in the loss. f gives changes a mean square of 1 in their units. The
        datasets of a family have one law, so that p also follows the differences between them.
        """
        row, pairs = row_of(self.rows, domain.family), []
        self.change_law[row] = 1.0  # then the expected change is a `step_rms`
        for z, z_next in steps:
            step_rms = self.of("step_rms", domain, z.shape[-1])
            changes = torch.stack([self.expected_change(z, domain), self.field_rms(z_next - z, domain)])
            pairs.append((changes / step_rms).squeeze(2).square().mean(2).sqrt())
        every = torch.cat(pairs, 1).double()
        if not (moving := every[1] > SMALLEST_RATIO).any():
            return
        a, change = every[:, moving].log()
        around = a - a.mean()
        covariance, variance = (around * change).mean(), (around * around).mean()
        exponent = ((covariance + PRIOR_VARIANCE) / (variance + PRIOR_VARIANCE)).clamp(*EXPONENTS)
        factor = (2 * (change - exponent * a)).exp().mean().sqrt()
        self.change_law[row] = torch.stack([factor, exponent])

    def standardize(self, z: Tensor, domain: Domain) -> tuple[Tensor, Tensor]:
        """States of zero mean and unit amplitude (B, N, D), and the removed means and log amplitudes (B, 2 D)."""
        a, mean = self.amplitude(z, domain), z.mean(1, keepdim=True)
        x = (z - mean) / (self.of("fluctuation_rms", domain, z.shape[-1]) * a)
        return x, torch.cat([mean, a.log()], -1).squeeze(1)

    def without_conserved(self, change: Tensor, conserved: Tensor, domain: Domain) -> Tensor:
        """The change (B, N, D) of a state minus its component that changes conserved integrals.

        `conserved` (families, D) is the direction of the integrals in the mean of latents over tokens, of unit length
        per field, 0 where nothing is conserved.
        """
        channels = change.shape[-1]
        direction = conserved[row_of(self.rows, domain.family), :channels]
        same_field = self.of("field_average", domain, channels)[:, :channels] > 0
        # Not a matrix product: autocast would compute it in bfloat16.
        along = ((change.mean(1) * direction).unsqueeze(-1) * same_field).sum(1)
        return change - (along * direction).unsqueeze(1)

    def limit_step(self, z: Tensor, before: Tensor, domain: Domain) -> Tensor:
        """The state z (B, N, D) after a step from `before`, limited by `clamp_state`, `max_growth` and `max_rms`.

        Where the RMS of a field's fluctuation exceeds `max_growth` times that of `before`, or both `max_rms` and that
        of `before`, the whole fluctuation of the field is rescaled to the limit. Clamping single tokens would leave a
        diverging field at its peak value everywhere.
        """
        if not self.limits:
            return z
        clamped = self.clamp_state(z, domain, before)
        mean, fluctuation = _split(clamped)
        # Training takes the factor for a constant, which saves time; a trained model has exact gradients.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.training):
            floor = SMALLEST_FLUCTUATION * self.of("fluctuation_rms", domain, z.shape[-1])
            rms_before = torch.maximum(self.field_rms(_split(before)[1], domain), floor)
            grown = self.of("max_growth", domain, z.shape[-1]) * rms_before
            largest = torch.maximum(self.of("max_rms", domain, z.shape[-1]), rms_before)
            factor = torch.minimum(grown, largest) / torch.maximum(self.field_rms(fluctuation, domain), 1e-6 * floor)
        limited = torch.where(factor >= 1, clamped, mean + factor.clamp(max=1.0) * fluctuation)
        self._count(z, limited, domain)
        return limited

    def limit_solution(self, z: Tensor, domain: Domain) -> Tensor:
        """The steady solution z (B, N, D), limited by `clamp_state`."""
        limited = self.clamp_state(z, domain)
        self._count(z, limited, domain)
        return limited

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count no states meanwhile, because they are not the final ones of a step."""
        limited, self.limited = self.limited, None
        try:
            yield
        finally:
            self.limited = limited

    def _count(self, z: Tensor, limited: Tensor, domain: Domain) -> None:
        """Count what the limits changed in states (B, N, D); a value that is not finite counts as changed."""
        if self.limited is not None:
            smallest = SMALLEST_CHANGE * self.of("fluctuation_rms", domain, z.shape[-1])
            changed = (~((z - limited).abs() <= smallest)).flatten(1).float().mean(1)
            self.limited += torch.stack([torch.ones_like(changed), (changed > 0).float(), changed]).sum(1)

    def clamp_state(self, z: Tensor, domain: Domain, before: Tensor | None = None) -> Tensor:
        """Clamp the mean of z (B, N, D) to `max_mean` and its fluctuation to `max_fluctuation`.

        A fluctuation that is clamped is then moved to a mean of zero and reduced, so that its peaks stay within the
        limit; training leaves this out to save time. After a step from `before` the limits are at least as large as
        that state, so that a rollout is bounded by its initial state and the limits (by induction), even from initial
        states beyond those of training. The input of a network is clamped without `before`: beyond the range of
        training it would extrapolate.
        """
        if not self.limits:
            return z
        mean, fluctuation = _split(z)
        max_mean = self.of("max_mean", domain, z.shape[-1])
        max_fluctuation = self.of("max_fluctuation", domain, z.shape[-1])
        if before is not None:
            mean_before, fluctuation_before = _split(before)
            max_mean = torch.maximum(max_mean, mean_before.abs())
            max_fluctuation = torch.maximum(max_fluctuation, fluctuation_before.abs().amax(1, keepdim=True))
        within = (mean.abs() <= max_mean) & (fluctuation.abs() <= max_fluctuation)
        mean, fluctuation = mean.clamp(-max_mean, max_mean), fluctuation.clamp(-max_fluctuation, max_fluctuation)
        if not (self.training and torch.is_grad_enabled()):
            within = within.all(1, keepdim=True)
            shift = fluctuation.mean(1, keepdim=True)
            fluctuation = (fluctuation - shift) / (1 + shift.abs() / max_fluctuation.clamp_min(1e-30))
        return torch.where(within, z, mean + fluctuation)


def _split(z: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over tokens (B, 1, D) and fluctuation (B, N, D)."""
    mean = z.mean(1, keepdim=True)
    return mean, z - mean
