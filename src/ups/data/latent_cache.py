"""The latent cache: encoded trajectories with statistics, which training reads.

Arrays are those of `ups.data.latent_shards`. The manifest is written last; a cache without it is unfinished, and
reading it is refused. The manifest holds the key of the cache: codec weights, source files and options from which the
latents were made. Reading imports neither zarr nor h5py, so that training processes start sooner.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from ups.data.families import Dataset, condition_features
from ups.data.latent_shards import LatentArray, Layout
from ups.data.pdebench import FAMILIES
from ups.errors import DataFault
from ups.files import NAME, read_json, relative, resolved, write_json
from ups.models.state_statistics import SMALLEST_FLUCTUATION, UNLIMITED

if TYPE_CHECKING:
    from ups.data.encoding import Encode, EncodedArray, Encoding

MANIFEST = "manifest.json"
REMEDY = "run `kedro run --from-nodes encode_latents`"
MARGIN = 1.5  # limit on predictions / largest value in the training split


def write_manifest(
    folder: Path,
    key: dict[str, Any],
    encoding: "Encoding",
    splits: dict[str, dict[str, list[int]]],
    token_grids: dict[str, list[int]],
    raw: Path,
) -> None:
    """Write the manifest of a cache whose shards are all written, with the statistics of the training split.

    `key` identifies what the latents were made from; `token_grids` has the token grid of every family; `raw` is the
    folder of the raw files, kept relative to `folder` so that a data root can be moved.
    """
    datasets, entries = encoding.datasets, {}
    for name, dataset in datasets.items():
        layouts = {kind: layout for (of, kind), layout in encoding.layouts.items() if of == name}
        train = sorted(splits[name]["train"])
        entries[name] = {
            "dataset": asdict(dataset),
            "arrays": {kind: asdict(layout) for kind, layout in layouts.items()},
            "token_grid": token_grids[dataset.family],
            "condition": condition_features(dataset),
            "split": splits[name],
            "statistics": summarize(partial(encoding.statistics, name, train)),
        }
    families = FAMILIES.in_order(dataset.family for dataset in datasets.values())
    place = {"on_disk": encoding.on_disk, "raw": relative(raw, folder)}
    write_json(folder / MANIFEST, {"key": key, "families": families, "datasets": entries} | place)


def summarize(statistics: Callable[[], Iterator[np.ndarray]]) -> dict[str, list[float]]:
    """Statistics per field over the training split, for `ups.models.state_statistics.StateStatistics`.

    `statistics` starts to yield those of every snapshot, trajectory by trajectory (T, 4, C): it is gone through twice.

    - `fluctuation_rms`, `step_rms`: RMS of the fluctuation, and of the change of one time step;
    - `max_fluctuation`: 1.5 times the largest magnitude of the fluctuation;
    - `max_mean`: 1.5 times the largest magnitude of the mean, plus a tenth of `max_fluctuation`, because the means of
      all training snapshots may be near zero;
    - `max_growth`: largest factor, at least 1, by which a step raises the RMS of the fluctuation; RMS values below
      SMALLEST_FLUCTUATION times `fluctuation_rms` count as that; unlimited for steady families;
    - `max_rms`: 1.5 times the largest RMS of the fluctuation of a snapshot.
    """
    parts = [(len(each), each.max(0), each.sum(0)) for each in statistics()]
    counts = np.array([length for length, _, _ in parts])
    max_mean, max_fluctuation, max_square, _ = np.max([largest for _, largest, _ in parts], axis=0)
    squares = np.sum([total for _, _, total in parts], axis=0)[2:]
    fluctuation, change = np.sqrt(squares / np.maximum([[counts.sum()], [(counts - 1).sum()]], 1))
    floor = np.maximum(SMALLEST_FLUCTUATION * fluctuation, np.finfo(float).tiny)
    growth = np.full(len(floor), UNLIMITED if counts.max() == 1 else 1.0)
    for each in statistics():
        rms = np.sqrt(each[:, 2])
        growth = np.maximum(growth, (rms[1:] / np.maximum(rms[:-1], floor)).max(0, initial=0.0))
    found = {"fluctuation_rms": fluctuation, "step_rms": change}
    found |= {"max_mean": MARGIN * (max_mean + max_fluctuation / 10), "max_fluctuation": MARGIN * max_fluctuation}
    found |= {"max_growth": growth, "max_rms": MARGIN * np.sqrt(max_square)}
    return {name: values.tolist() for name, values in found.items()}


class _Array(BaseModel):
    shape: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt]
    scale: PositiveFloat | None
    num_axes: PositiveInt


class _Entry(BaseModel):
    dataset: dict[str, Any]
    arrays: dict[Literal["fields", "coefficients"], _Array]
    token_grid: list[PositiveInt]
    condition: list[float]
    split: dict[str, list[NonNegativeInt]]
    statistics: dict[str, list[float]]


class _Manifest(BaseModel):
    key: dict[str, Any]
    families: list[str]
    on_disk: bool
    raw: str
    datasets: dict[Annotated[str, Field(pattern=f"^{NAME.pattern}$")], _Entry]


class LatentCache:
    """Latents of every dataset; the checksum of a piece is verified before its first use.

    `datasets` has an entry per dataset with its description, array shapes, token grid, condition, split and
    statistics; `families` are all families of the cache, in the order of the models' rows. Unless `on_disk`, there are
    no latents until `encoded_by` says how to make them.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.datasets: dict[str, dict[str, Any]] = manifest["datasets"]
        self.families: list[str] = manifest["families"]
        self.manifest = manifest
        self._arrays: dict[tuple[str, str], LatentArray | EncodedArray] = {
            (name, kind): LatentArray(folder / f"{name}.zarr" / kind, layout)
            for (name, kind), layout in self._layouts()
        }

    def _layouts(self) -> Iterator[tuple[tuple[str, str], Layout]]:
        for name, entry in self.datasets.items():
            for kind, array in entry["arrays"].items():
                yield (name, kind), Layout(tuple(array["shape"]), array["scale"], array["num_axes"])

    @classmethod
    def open(cls, folder: Path, key: dict[str, Any]) -> "LatentCache":
        """Open a finished cache with this key.

        Raises:
            DataFault: there is no manifest, it is damaged, or it has another key.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise DataFault(f"{folder} holds no finished latent cache: {REMEDY}")
        manifest = read_json(path)
        try:
            _Manifest.model_validate(manifest)
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            raise DataFault(f"{path} is damaged ({place}: {problem['msg']}); delete {folder} and run again") from None
        differing = [name for name in key if manifest["key"].get(name) != key[name]]
        if differing:
            raise DataFault(f"the latent cache {folder} was made from another {', '.join(differing)}: {REMEDY}")
        return cls(folder, manifest)

    def only(self, *families: str) -> "LatentCache":
        """The same cache restricted to the datasets of `families`; the models' rows stay those of all families."""
        chosen = {name: entry for name, entry in self.datasets.items() if entry["dataset"]["family"] in families}
        cache = LatentCache(self.folder, self.manifest | {"datasets": chosen})
        cache._arrays = {place: self._arrays[place] for place in cache._arrays}  # those of `encoded_by` too
        return cache

    @property
    def raw(self) -> Path:
        """The folder of the raw files."""
        return resolved(self.manifest["raw"], self.folder)

    @property
    def on_disk(self) -> bool:
        """Whether there are latents on disk."""
        return self.manifest["on_disk"]

    def encoded_by(self, encode: "Encode") -> "LatentCache":
        """The same cache, whose latents are encoded from the raw files each time they are read."""
        from ups.data.encoding import EncodedArray  # imports h5py
        from ups.data.trajectories import TrajectoryReader

        cache, raw = copy.copy(self), self.raw
        datasets = {name: Dataset.from_json(entry["dataset"]) for name, entry in self.datasets.items()}
        readers = {name: TrajectoryReader(raw, dataset) for name, dataset in datasets.items()}
        cache._arrays = {
            (name, kind): EncodedArray(readers[name], kind, layout, encode) for (name, kind), layout in self._layouts()
        }
        return cache

    @property
    def num_bytes(self) -> int:
        """Bytes of all latents on disk."""
        arrays = [array for array in self._arrays.values() if isinstance(array, LatentArray)]
        return sum(path.stat().st_size for array in arrays for path in array.shards())

    def preload(self) -> None:
        """Let the system read all latents into its page cache, which all processes of a machine share."""
        for array in self._arrays.values():
            if isinstance(array, LatentArray):
                array.preload()

    def read(self, name: str, kind: str, index: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Latents of one trajectory's snapshots `start` to `stop`, by default all, float32 (t, N, D).

        Raises:
            DataFault: a piece is missing, truncated or altered.
        """
        array = self._arrays[name, kind]
        return array.read(index, start, array.layout.shape[1] if stop is None else stop)
