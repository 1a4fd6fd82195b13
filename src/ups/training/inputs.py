"""Shared by all stages that are trained on latents: latent cache, model sizes, state statistics, RMS per field."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from ups.config.training import Backbone
from ups.data.families import NUM_CONDITIONS
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.data.samples import LatentSamples, domains
from ups.files import place_of
from ups.models.baselines import NormalizedGridOperator
from ups.models.codec import Codec, FieldGroup, codec_from, group_name
from ups.models.conservation import Constraint, GasIntegrals, MirrorImages
from ups.models.grid import MAX_POINTS
from ups.models.operator import NUM_GAINS, TINY, Operator, mode_places
from ups.models.sizes import Domain, row_of
from ups.models.state_statistics import StateStatistics
from ups.models.weights import load_model
from ups.runs.processes import free_memory_bytes
from ups.runs.run import Run

if TYPE_CHECKING:
    from ups.data.encoding import Encode  # imports h5py

MOST_STEPS, MOST_VALUES, BATCH_VALUES = 512, 2**26, 2**20  # of the states to which persistence is fitted
MOST_MOVED = 0.01  # by a constraint that the data meet, relative to a time step
SMALLEST_STATISTIC = 1e-3  # latents have about unit variance; fields that are constant in the data have 0


def open_cache(run: Run, *kinds: Literal["transient", "steady"]) -> LatentCache:
    """A run's latent cache, limited to families of these kinds.

    Latents on disk are read ahead into the page cache if they fit into half of the free memory, or if
    `launch.preload_latents` says so; latents that are not on disk are encoded from the raw files.

    Raises:
        DataFault: the receipt has another key.
    """
    receipt = run.inputs["latent_cache"]
    cache = LatentCache.open(place_of(run.data_root, receipt), receipt["key"])
    cache = cache.only(*(family for kind in kinds for family in receipt[kind]))
    if not cache.on_disk:
        codec = load_model(codec_from, run.data_root, receipt["codec"])
        return cache.encoded_by(encoder(codec, torch.device("cpu")))
    preload = run.launch.preload_latents
    if preload or (preload is None and cache.num_bytes < free_memory_bytes(torch.device("cpu")) / 2):
        cache.preload()
    return cache


def encoder(codec: Codec, device: torch.device) -> "Encode":
    """Snapshots (T, C, *grid) to latents (T, N, D) on the CPU, by a codec on `device`."""
    codec = codec.to(device)

    @torch.no_grad()
    def encode(u: Tensor, family: str, kind: str) -> Tensor:
        return codec.encode(u.to(device), group_name(family, kind)).cpu()

    return encode


def entries_of(cache: LatentCache, family: str) -> list[dict[str, Any]]:
    """The entries of the cache for a family, one per dataset."""
    return [entry for entry in cache.datasets.values() if entry["dataset"]["family"] == family]


def model_settings(cache: LatentCache, model: Backbone, history: Sequence[str] = ()) -> dict[str, Any]:
    """Constructor arguments of operator, steady model or denoiser as plain values, as saved with the weights."""
    num_axes: Counter[str] = Counter()  # 0 for families that are not in the cache
    channels: Counter[tuple[str, str]] = Counter()  # 0 also for families without coefficients
    for entry in cache.datasets.values():
        family = entry["dataset"]["family"]
        num_axes[family] = len(entry["token_grid"])
        channels |= Counter({(family, kind): array["shape"][-1] for kind, array in entry["arrays"].items()})
    sizes = {
        "families": cache.families,
        "num_axes": [num_axes[name] for name in cache.families],
        "num_fields": [len(FAMILIES[name].fields) for name in cache.families],
        "latent_channels": [channels[name, "fields"] for name in cache.families],
        "coefficient_channels": [channels[name, "coefficients"] for name in cache.families],
        "num_conditions": NUM_CONDITIONS,
        "history": [name for name in cache.families if name in history],
    }
    return {"sizes": sizes, "backbone": model.model_dump()}


# Floats that training keeps per token: for each hidden channel of each block 22 to 50 on CPU (1D to 3D, Fourier mixing,
# attention, U-shape, float32), and up to 20 for each latent channel. Without activation checkpointing.
FLOATS_PER_HIDDEN_CHANNEL, FLOATS_PER_LATENT_CHANNEL = 50, 20


def network_bytes(
    settings: dict[str, Any], num_tokens: dict[str, int], horizons: Mapping[str, int] = {}
) -> dict[str, int]:
    """Estimated memory of forward and backward pass of a sample of each family; `horizons` as in `LatentSamples`."""
    sizes, backbone = settings["sizes"], settings["backbone"]
    hidden = max(backbone["hidden_channels"]) * backbone["num_layers"]
    estimates = {}
    for family, tokens in num_tokens.items():
        row = sizes["families"].index(family)
        rows = sizes["num_fields"][row] if backbone["separate_fields"] else 1
        floats = FLOATS_PER_HIDDEN_CHANNEL * hidden * rows + FLOATS_PER_LATENT_CHANNEL * sizes["latent_channels"][row]
        estimates[family] = 4 * tokens * floats * horizons.get(family, 1)
    return estimates


def set_statistics(statistics: StateStatistics, cache: LatentCache) -> None:
    """Fill in the statistics of the training split, the maximum over the datasets of a family.

    The cache has one value per field, the model one per latent channel: each value is repeated over the components of
    its field.
    """
    for family in {entry["dataset"]["family"] for entry in cache.datasets.values()}:
        entries = entries_of(cache, family)
        found = {name: np.max([entry["statistics"][name] for entry in entries], 0) for name in entries[0]["statistics"]}
        set_statistics_of(statistics, family, found, entries[0]["arrays"]["fields"]["shape"][-1])


def set_statistics_of(
    statistics: StateStatistics, family: str, found: Mapping[str, Sequence[float]], num_channels: int
) -> None:
    """Fill in the statistics of one family by name, each with a value per field, for its `num_channels` latents."""
    row, num_fields = row_of(statistics.rows, family), len(FAMILIES[family].fields)
    num_components = num_channels // num_fields
    for name, values in found.items():
        own = torch.as_tensor(values, dtype=torch.float32).clamp(min=SMALLEST_STATISTIC)
        getattr(statistics, name)[row, :num_channels] = own.repeat_interleave(num_components)
    blocks = [torch.full((num_components, num_components), 1 / num_components)] * num_fields
    statistics.field_average[row, :num_channels, :num_channels] = torch.block_diag(*blocks)


def fit_to_steps(
    model: Operator | NormalizedGridOperator, cache: LatentCache, codec: Codec, *, constrained: bool
) -> None:
    """Fit expected change, filter and constraints of a model to `training_steps` of every family, read once."""
    for family, domain in domains(cache).items():
        if not FAMILIES[family].steady:
            steps = list(training_steps(cache, family))
            model.statistics.fit_change_law(steps, domain)
            if isinstance(model, Operator):
                fit_persistence(model, codec, domain, steps)
            if constrained:
                fit_constraints(model.constraints, codec, domain, steps)


def training_steps(cache: LatentCache, family: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Time steps z -> z_next of the training split, each (B, N, D), at most `MOST_STEPS` and half a gigabyte in all."""
    samples = LatentSamples(cache, "train")
    values = math.prod(entries_of(cache, family)[0]["arrays"]["fields"]["shape"][2:])
    every = np.random.default_rng(0).permutation(samples.num_samples[family])
    chosen = every[: max(1, min(MOST_STEPS, MOST_VALUES // values))]
    for part in np.array_split(chosen, min(len(chosen), -(-len(chosen) * values // BATCH_VALUES))):
        batch = samples.load(family, part)
        yield batch.z, batch.z_next


@torch.no_grad()
def fit_persistence(operator: Operator, codec: Codec, domain: Domain, steps: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Fit `DampedPersistence` for a family to time steps z -> z_next, each (B, N, D); needs the expected change.

    Per field and wavenumber, with means over the samples and modes, and states in units of the expected change:
    P = <z z_next> / <z^2>, which has the least error, between 0 and 1, and R = <(z_next - P z)^2> / grid points. P = 1
    for the mean, and for no wave less than for a shorter one: it is smooth. Nothing is fitted where the codec drops
    components, and where an axis has more than `MAX_POINTS`.
    """
    name, filters = group_name(domain.family, "fields"), operator.persistence
    group, row = codec.groups[name], row_of(filters.rows, domain.family)
    grid = tuple(n * group.patch for n in domain.grid)  # the codec may have been trained on another one
    if group.components < group.patch_points or max(grid) > MAX_POINTS:
        return
    filters.bases[row, : group.num_channels, : group.num_channels] = torch.block_diag(*codec.bases(name))
    filters.find_fitted()
    places = mode_places(grid, domain.periodic, filters.gains.device).round().long().flatten()
    sums = torch.zeros(4, len(group.mean), NUM_GAINS, dtype=torch.float64)
    for z, z_next in steps:
        unit = operator.statistics.expected_change(z, domain)
        before, after = (filters.spectrum(x / unit, domain).double().flatten(2) for x in (z, z_next))
        products = torch.stack([torch.ones_like(before), before.square(), before * after, after.square()])
        sums.index_add_(-1, places, products.sum(2))
    count, past, both, new = sums
    kept = (both / past.clamp(min=TINY)).clamp(0, 1)
    kept[:, 0] = 1
    kept = kept.flip(-1).cummax(-1).values.flip(-1)
    rest = (new - 2 * kept * both + kept.square() * past) / count.clamp(min=1) / math.prod(grid)
    known, every = 1 + count[0, 1:].nonzero().flatten().numpy(), np.arange(1, NUM_GAINS)
    for gains, values in zip(filters.gains[row], (kept, rest), strict=True):
        for field, of_field in enumerate(values.numpy()):
            gains[field, 0] = of_field[0]
            gains[field, 1:] = torch.from_numpy(np.interp(every, known, of_field[known]))


@torch.no_grad()
def fit_constraints(
    constraints: Iterable[Constraint], codec: Codec, domain: Domain, steps: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """Turn on the constraints that suit a family and that its time steps z -> z_next, each (B, N, D), meet.

    They do where moving z_next changes it by less than `MOST_MOVED` of the step, in RMS: gas does not keep its
    integrals on grids that leave out points of the solver's. None is on where the codec drops components, because then
    the latents do not determine the fields, nor where an axis has more than `MAX_POINTS`.
    """
    name, every = group_name(domain.family, "fields"), list(steps)
    group, fields = codec.groups[name], len(FAMILIES[domain.family].fields)
    grid = [n * group.patch for n in domain.grid]
    if group.components < group.patch_points or max(grid) > MAX_POINTS:
        return
    bases = torch.block_diag(*codec.bases(name)).to(every[0][0].device)
    changed = sum((z_next - z).square().sum().item() for z, z_next in every)
    for constraint in constraints:
        if _suits(constraint, group, domain) and constraint.holds(grid, domain.periodic):
            units = constraint.units[row_of(constraint.rows, domain.family)]
            units[:, :fields] = torch.tensor([group.std, group.mean])
            constraint.find_on()
            moved = (constraint(z_next, z, bases, domain) - z_next for z, z_next in every)
            if not sum(each.square().sum().item() for each in moved) < MOST_MOVED**2 * changed:
                units.zero_()
                constraint.find_on()


def _suits(constraint: Constraint, group: FieldGroup, domain: Domain) -> bool:
    family, num_axes = FAMILIES[domain.family], len(domain.grid)
    if isinstance(constraint, GasIntegrals):
        are_logs = (True, True, *[False] * num_axes)
        return family.fields[:2] == ("density", "pressure") and group.log == are_logs
    if isinstance(constraint, MirrorImages):
        return family.isotropic and not family.vectors and not family.coefficients
    is_incompressible = family.divergence_free == family.fields[:num_axes]
    return is_incompressible and not any(group.log[:num_axes])


def field_rms(error: Tensor, family: str) -> Tensor:
    """RMS of latents (B, N, D) over the tokens and components of each field, (B, C)."""
    num_fields = len(FAMILIES[family].fields)
    return (error.unflatten(2, (num_fields, -1)).square().mean(dim=(1, 3)) + 1e-12).sqrt()
