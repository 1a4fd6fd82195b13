"""Latent caches for tests: every grid point is a token, every field a latent channel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ups.data.encoding import Encode, Encoding
from ups.data.families import Dataset
from ups.data.latent_cache import write_manifest
from ups.data.pdebench import FAMILIES
from ups.data.remote import SharedFolder
from ups.models.codec import FieldGroup, group_name


def points_as_tokens(u: Tensor, family: str, kind: str) -> Tensor:
    """Snapshots (T, C, *grid) as latents (T, N, C)."""
    return u.flatten(2).swapaxes(1, 2)


def encoding_of(
    folder: Path,
    datasets: dict[str, Dataset],
    scale: float | None = None,
    on_disk: bool = True,
    store: SharedFolder | None = None,
) -> Encoding:
    """The arrays of a cache of these latents, with their metadata written."""
    groups = {}
    for dataset in datasets.values():
        family = FAMILIES[dataset.family]
        for kind, names in (("fields", family.fields), ("coefficients", family.coefficients)):
            count = len(names)
            statistics = {"log": (False,) * count, "mean": (0.0,) * count, "std": (1.0,) * count}
            groups[group_name(family.name, kind)] = FieldGroup(dataset.grid, 1, 1, **statistics)
    scales = {dataset.family: scale for dataset in datasets.values()}
    encoding = Encoding(folder, datasets, groups, scales, on_disk=on_disk, store=store)
    encoding.prepare()
    return encoding


def write_cache(
    folder: Path,
    raw: Path,
    datasets: dict[str, Dataset],
    splits: dict[str, dict[str, list[int]]],
    *,
    key: dict[str, Any],
    scale: float | None = None,
    on_disk: bool = True,
    store: SharedFolder | None = None,
    encode: Encode = points_as_tokens,
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Write a whole cache into `folder`, or complete it."""
    encoding = encoding_of(folder, datasets, scale, on_disk, store)
    encoding.write_share(raw, encode, advance, memory_bytes=2**28)
    token_grids = {dataset.family: list(dataset.grid) for dataset in datasets.values()}
    write_manifest(folder, key, encoding, splits, token_grids, raw)
