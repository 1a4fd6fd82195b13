"""The latent cache: encoded trajectories in zarr arrays with checksums, which training reads through memory maps.

Every chunk is one trajectory, not compressed, so a chunk file holds the bytes of the latents and then their crc32c. The
manifest is written last; a cache without it is unfinished, and reading it is refused. The manifest holds the key of the
cache: codec weights, source files and options from which the latents were made. Reading imports neither zarr nor h5py,
so that training processes start sooner.
"""

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import google_crc32c
import numpy as np
import torch
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError

from ups.data.families import Dataset, condition_features
from ups.data.pdebench import FAMILIES
from ups.errors import DataFault
from ups.files import NAME, read_json, write_json
from ups.models.codec import Codec, codec_from, group_name
from ups.models.state_statistics import SMALLEST_FLUCTUATION, UNLIMITED
from ups.models.weights import load_model

if TYPE_CHECKING:
    import zarr

MANIFEST = "manifest.json"
CHECKSUM_BYTES = 4
REMEDY = "run `kedro run --from-nodes encode_latents`"
MAX_OPEN_CHUNKS = 4096  # memory maps that a process keeps open
SNAPSHOTS_AT_ONCE = 16  # encoded together; limits the memory that the codec needs
MARGIN = 1.5  # limit on predictions / largest value in the training split
WRITE_ALL = {"write_empty_chunks": True}  # zarr omits chunks of the fill value NaN, which would look like a lost file

Encode = Callable[[np.ndarray, str, str], np.ndarray]
"""Snapshots (T, C, *grid) of a family's `fields` or `coefficients` to latents (T, N, D)."""


def encode_datasets(
    folder: Path,
    datasets: dict[str, Any],
    codec_receipt: dict[str, Any],
    *,
    dtype: str,
    device: str,
    raw: Path,
    data_root: Path,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Write the cache into `folder`, or complete an interrupted one; returns its receipt.

    `datasets` is the receipt of `describe_datasets`, `raw` the folder of the HDF5 files. `advance` gets the number of
    trajectories done since its last call.
    """
    codec = load_model(codec_from, data_root, codec_receipt).to(device)
    described = {name: Dataset.from_json(entry) for name, entry in datasets["datasets"].items()}
    write_latents(folder, raw, described, partial(_encode, codec, device), dtype, advance)
    key = {
        "codec weights": codec_receipt["weights"],
        "normalization": {name: [group.log, group.mean, group.std] for name, group in codec.groups.items()},
        "source files": {name: file["md5"] for name, file in datasets["sources"].items()},
        "splits": datasets["fingerprint"],
        "options": {"dtype": dtype},
    }
    token_grids = {d.family: list(codec.groups[group_name(d.family, "fields")].token_grid) for d in described.values()}
    write_manifest(folder, key, described, datasets["splits"], token_grids)
    families = sorted(token_grids)
    return {
        "key": key,
        "codec": codec_receipt,
        "steady": [family for family in families if FAMILIES[family].steady],
        "transient": [family for family in families if not FAMILIES[family].steady],
    }


@torch.no_grad()
def _encode(codec: Codec, device: str, u: np.ndarray, family: str, kind: str) -> np.ndarray:
    parts = torch.from_numpy(u).split(SNAPSHOTS_AT_ONCE)
    return torch.cat([codec.encode(part.to(device), group_name(family, kind)).cpu() for part in parts]).numpy()


def write_latents(
    folder: Path, raw: Path, datasets: dict[str, Dataset], encode: Encode, dtype: str, advance: Callable[[int], None]
) -> None:
    """Encode every trajectory without a complete chunk in `folder`: `fields` (T, N, D), `coefficients` (1, N, D)."""
    from ups.data.trajectories import TrajectoryReader

    for name, dataset in datasets.items():
        kinds = ("fields", "coefficients") if FAMILIES[dataset.family].coefficients else ("fields",)
        with TrajectoryReader(raw, dataset) as reader:
            for index in range(dataset.num_trajectories):
                for kind in kinds:
                    if not _is_whole(folder, name, kind, index):
                        u = reader.read(index) if kind == "fields" else reader.read_coefficients(index)[None]
                        z = encode(u, dataset.family, kind)
                        _array(folder, name, kind, dataset.num_trajectories, z.shape, dtype)[index] = z
                advance(1)


def _array(folder: Path, name: str, kind: str, count: int, shape: tuple[int, ...], dtype: str) -> "zarr.Array":
    import zarr
    from zarr.codecs import Crc32cCodec

    path = folder / f"{name}.zarr" / kind
    if (path / "zarr.json").is_file():
        return zarr.open_array(path, mode="r+", config=WRITE_ALL)
    return zarr.create_array(
        path, shape=(count, *shape), chunks=(1, *shape), dtype=dtype,
        fill_value=np.nan, compressors=Crc32cCodec(), config=WRITE_ALL,
    )  # fmt: skip


def _chunk(folder: Path, name: str, kind: str, index: int) -> Path:
    return folder / f"{name}.zarr" / kind / "c" / str(index) / "0" / "0" / "0"


def _is_whole(folder: Path, name: str, kind: str, index: int) -> bool:
    chunk = _chunk(folder, name, kind, index)
    return chunk.is_file() and _checksum_agrees(chunk.read_bytes())


def _checksum_agrees(content: bytes) -> bool:
    values, checksum = content[:-CHECKSUM_BYTES], content[-CHECKSUM_BYTES:]
    return bool(values) and google_crc32c.value(values) == int.from_bytes(checksum, "little")


def write_manifest(
    folder: Path, key: dict[str, Any], datasets: dict[str, Dataset], splits: dict, token_grids: dict[str, list[int]]
) -> None:
    """Read all latents back, compute the statistics of the training split, and write the manifest.

    `key` identifies what the latents were made from; `token_grids` has the token grid of every family.

    Raises:
        DataFault: latents are not finite, or damaged on disk.
    """
    import zarr

    entries = {}
    for name, dataset in datasets.items():
        paths = [folder / f"{name}.zarr" / kind for kind in ("fields", "coefficients")]
        arrays = {path.name: zarr.open_array(path, mode="r") for path in paths if path.is_dir()}
        shapes = {kind: {"shape": list(array.shape), "dtype": str(array.dtype)} for kind, array in arrays.items()}
        entry = {"dataset": asdict(dataset), "arrays": shapes, "token_grid": token_grids[dataset.family]}
        entries[name] = entry | {"condition": condition_features(dataset), "split": splits[name]}
    families = [name for name in FAMILIES if any(dataset.family == name for dataset in datasets.values())]
    cache = LatentCache(folder, {"families": families, "datasets": entries})
    for name, entry in entries.items():
        entry["statistics"] = _statistics(cache, name, len(FAMILIES[entry["dataset"]["family"]].fields))
    write_json(folder / MANIFEST, {"key": key, "families": families, "datasets": entries})


def _statistics(cache: "LatentCache", name: str, num_fields: int) -> dict[str, list[float]]:
    """Statistics per field over the training split, for `ups.models.state_statistics.StateStatistics`.

    The fluctuation of a snapshot is z minus its mean over tokens.

    - `fluctuation_rms`, `step_rms`: RMS of the fluctuation, and of the change of one time step;
    - `max_fluctuation`: 1.5 times the largest magnitude of the fluctuation;
    - `max_mean`: 1.5 times the largest magnitude of the mean, plus a tenth of `max_fluctuation`, because the means of
      all training snapshots may be near zero;
    - `max_growth`: largest factor, at least 1, by which a step raises the RMS of the fluctuation; RMS values below
      SMALLEST_FLUCTUATION times `fluctuation_rms` count as that; unlimited for steady families;
    - `max_rms`: 1.5 times the largest RMS of the fluctuation of a snapshot.
    """
    squares, peaks, counts = np.zeros((2, num_fields)), np.zeros((2, num_fields)), np.zeros((2, 1))
    rms_of_snapshots = []
    train = set(cache.datasets[name]["split"]["train"])
    for index in range(cache.datasets[name]["arrays"]["fields"]["shape"][0]):
        z = cache.read(name, "fields", index).astype(np.float64)
        if not np.isfinite(z).all():
            raise DataFault(f"latents of {name}, trajectory {index}, are not finite: the codec diverged")
        if index in train:
            z = z.reshape(*z.shape[:2], num_fields, -1)  # (T, N, C, components)
            mean = z.mean(axis=1, keepdims=True)
            for kind, part in enumerate((z - mean, np.diff(z, axis=0))):
                squares[kind] += np.square(part).sum(axis=(0, 1, 3))
                counts[kind] += part.size // num_fields
            for kind, part in enumerate((mean, z - mean)):
                peaks[kind] = np.maximum(peaks[kind], np.abs(part).max(axis=(0, 1, 3)))
            rms_of_snapshots.append(np.sqrt(np.square(z - mean).mean(axis=(1, 3))))  # (T, C)
    fluctuation, change = np.sqrt(squares / np.maximum(counts, 1))
    max_mean, max_fluctuation = MARGIN * peaks
    floor = np.maximum(SMALLEST_FLUCTUATION * fluctuation, np.finfo(float).tiny)
    factors = np.array([rms[1:] / np.maximum(rms[:-1], floor) for rms in rms_of_snapshots]).reshape(-1, num_fields)
    statistics = {"fluctuation_rms": fluctuation, "step_rms": change}
    statistics |= {"max_mean": max_mean + max_fluctuation / 10, "max_fluctuation": max_fluctuation}
    statistics["max_growth"] = factors.max(axis=0, initial=1.0 if len(factors) else UNLIMITED)
    statistics["max_rms"] = MARGIN * np.concatenate(rms_of_snapshots).max(axis=0)
    return {name: values.tolist() for name, values in statistics.items()}


class _Array(BaseModel):
    shape: Annotated[list[PositiveInt], Field(min_length=4, max_length=4)]
    dtype: Literal["float16", "float32"]


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
    datasets: dict[Annotated[str, Field(pattern=f"^{NAME.pattern}$")], _Entry]


class LatentCache:
    """Latents of every dataset, read through memory maps; the checksum of a chunk is verified when it is opened.

    `datasets` has an entry per dataset with its description, array shapes, token grid, condition, split and
    statistics; `families` are all families of the cache, in the order of the models' rows.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.datasets: dict[str, dict[str, Any]] = manifest["datasets"]
        self.families: list[str] = manifest["families"]
        self._map = lru_cache(MAX_OPEN_CHUNKS)(self._open_chunk)

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
        return LatentCache(self.folder, {"families": self.families, "datasets": chosen})

    def read(self, name: str, kind: str, index: int) -> np.ndarray:
        """Latents (T, N, D) of one trajectory as a memory map, in the stored dtype.

        Raises:
            DataFault: the chunk is missing, truncated or altered.
        """
        return self._map(name, kind, index)

    def _open_chunk(self, name: str, kind: str, index: int) -> np.ndarray:
        chunk = _chunk(self.folder, name, kind, index)
        array = self.datasets[name]["arrays"][kind]
        shape, dtype = tuple(array["shape"][1:]), np.dtype(array["dtype"])
        num_bytes = math.prod(shape) * dtype.itemsize
        remedy = f"delete {self.folder} and run again"
        if not chunk.is_file() or chunk.stat().st_size != num_bytes + CHECKSUM_BYTES:
            raise DataFault(f"latent cache damaged: {chunk} is missing or truncated; {remedy}")
        if not chunk.resolve().is_relative_to(self.folder.resolve()):
            raise DataFault(f"latent cache damaged: {chunk} leads out of the cache by a link; {remedy}")
        content = np.memmap(chunk, np.uint8, "r")
        if not _checksum_agrees(content.tobytes()):
            raise DataFault(f"latent cache damaged: wrong checksum in {chunk}; {remedy}")
        return content[:num_bytes].view(dtype).reshape(shape)
