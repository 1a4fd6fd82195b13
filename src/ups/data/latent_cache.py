"""The latent cache: zarr arrays of encoded trajectories, checksummed, keyed by what made them, memory-mapped to read.

One uncompressed chunk is one trajectory, so a chunk file is the latents' bytes followed by their crc32c. The manifest
is the last file written; readers accept nothing without it. Reading imports neither zarr nor h5py: a training process
starts sooner without them.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np

from ups.data.condition import condition_features
from ups.data.dataset import Dataset
from ups.data.pdebench import FAMILIES
from ups.errors import DataFault
from ups.files import read_json, write_json
from ups.models.amplitude import SMALLEST_FLUCTUATION, UNLIMITED

if TYPE_CHECKING:
    import zarr

MANIFEST = "manifest.json"
CHECKSUM_BYTES = 4
OPEN_CHUNKS = 4096
MARGIN = 1.5
WRITE_ALL = {"write_empty_chunks": True}  # else latents that are all NaN, the fill value, would look like a lost chunk

Encode = Callable[[np.ndarray, str, str], np.ndarray]
"""Snapshots (T, C, *grid) of a family's `fields` or `coefficients` to latents (T, N, D)."""


def write_latents(
    folder: Path, raw: Path, datasets: dict[str, Dataset], encode: Encode, dtype: str, advance: Callable[[int], None]
) -> None:
    """Encode each trajectory that `folder` does not hold yet: kinds `fields` (T, N, D), `coefficients` (1, N, D)."""
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
        path,
        shape=(count, *shape),
        chunks=(1, *shape),
        dtype=dtype,
        fill_value=np.nan,
        compressors=Crc32cCodec(),
        config=WRITE_ALL,
    )


def _chunk(folder: Path, name: str, kind: str, index: int) -> Path:
    return folder / f"{name}.zarr" / kind / "c" / str(index) / "0" / "0" / "0"


def _is_whole(folder: Path, name: str, kind: str, index: int) -> bool:
    chunk = _chunk(folder, name, kind, index)
    return chunk.is_file() and _checksum_agrees(np.memmap(chunk, np.uint8, "r"))


def _checksum_agrees(content: np.ndarray) -> bool:
    if content.size <= CHECKSUM_BYTES:
        return False
    expected = int.from_bytes(content[-CHECKSUM_BYTES:].tobytes(), "little")
    return google_crc32c.value(content[:-CHECKSUM_BYTES].tobytes()) == expected


def write_manifest(
    folder: Path, key: dict[str, Any], datasets: dict[str, Dataset], splits: dict, token_grids: dict[str, list[int]]
) -> dict[str, Any]:
    """Read the whole cache back, take the statistics of its training split and write the manifest, the last file.

    `key` says what the latents were made from; `token_grids` has the token grid of every family.
    """
    import zarr

    entries = {}
    for name, dataset in datasets.items():
        shapes = {}
        for kind in ("fields", "coefficients"):
            if (folder / f"{name}.zarr" / kind).is_dir():
                array = zarr.open_array(folder / f"{name}.zarr" / kind, mode="r")
                shapes[kind] = {"shape": list(array.shape), "dtype": str(array.dtype)}
        entries[name] = {
            "dataset": asdict(dataset),
            "arrays": shapes,
            "token_grid": token_grids[dataset.family],
            "condition": condition_features(dataset),
            "split": splits[name],
        }
    cache = LatentCache(folder, {"key": key, "datasets": entries})
    for name, entry in entries.items():
        entry["statistics"] = _statistics(cache, name, len(FAMILIES[entry["dataset"]["family"]].fields))
    manifest = {"key": key, "datasets": entries}
    write_json(folder / MANIFEST, manifest)
    return manifest


def _statistics(cache: "LatentCache", name: str, num_fields: int) -> dict[str, list[float]]:
    """Per field over the training split, for `ups.models.amplitude.Amplitude`.

    `fluctuation` and `change`: RMS of z minus its mean over tokens, and of one step's change. `spread`: 1.5 times the
    largest magnitude of z minus its mean; `bound`: the same of the mean, plus a tenth of `spread`, since a mean that
    is always near zero says little about how far it may move. `growth`: the largest factor, at least 1, by which a step
    raises the RMS of z minus its mean, where that counts as no less than SMALLEST_FLUCTUATION of `fluctuation`, and no
    limit where there are no steps; `largest`: 1.5 times the largest such RMS of a snapshot.
    """
    squares, peaks, counts = np.zeros((2, num_fields)), np.zeros((2, num_fields)), np.zeros((2, 1))
    sizes = []
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
            sizes.append(np.sqrt(np.square(z - mean).mean(axis=(1, 3))))  # (T, C)
    fluctuation, change = np.sqrt(squares / np.maximum(counts, 1))
    bound, spread = MARGIN * peaks
    floor = np.maximum(SMALLEST_FLUCTUATION * fluctuation, np.finfo(float).tiny)
    factors = np.array([rms[1:] / np.maximum(rms[:-1], floor) for rms in sizes]).reshape(-1, num_fields)
    statistics = {"fluctuation": fluctuation, "change": change, "bound": bound + spread / 10, "spread": spread}
    statistics["growth"] = factors.max(axis=0, initial=1.0 if len(factors) else UNLIMITED)
    statistics["largest"] = MARGIN * np.concatenate(sizes).max(axis=0)
    return {name: values.tolist() for name, values in statistics.items()}


class LatentCache:
    """Latents of every dataset, read through memory maps; each chunk's checksum is verified when first touched."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.datasets: dict[str, dict[str, Any]] = manifest["datasets"]
        self._maps: OrderedDict[tuple[str, str, int], np.ndarray] = OrderedDict()

    @classmethod
    def open(cls, folder: Path, key: dict[str, Any]) -> "LatentCache":
        """Open a finished cache made from `key`.

        Raises:
            DataFault: there is no manifest, or it was made from something else.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise DataFault(f"{folder} holds no finished latent cache: run `kedro run --from-nodes encode_latents`")
        manifest = read_json(path)
        differing = [name for name in key if manifest["key"].get(name) != key[name]]
        if differing:
            raise DataFault(
                f"the latent cache {folder} was made from another {', '.join(differing)}: "
                "run `kedro run --from-nodes encode_latents`"
            )
        return cls(folder, manifest)

    def only(self, *families: str) -> "LatentCache":
        """The datasets of some families."""
        chosen = {name: entry for name, entry in self.datasets.items() if entry["dataset"]["family"] in families}
        return LatentCache(self.folder, {"datasets": chosen})

    def read(self, name: str, kind: str, index: int) -> np.ndarray:
        """Latents (T, N, D) of one trajectory, as stored; pages are read when used.

        Raises:
            DataFault: the chunk is missing, truncated or altered.
        """
        place = (name, kind, index)
        if place not in self._maps:
            self._maps[place] = self._map(name, kind, index)
            if len(self._maps) > OPEN_CHUNKS:
                self._maps.popitem(last=False)
        return self._maps[place]

    def _map(self, name: str, kind: str, index: int) -> np.ndarray:
        chunk = _chunk(self.folder, name, kind, index)
        array = self.datasets[name]["arrays"][kind]
        shape, dtype = tuple(array["shape"][1:]), np.dtype(array["dtype"])
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        if not chunk.is_file() or chunk.stat().st_size != num_bytes + CHECKSUM_BYTES:
            raise DataFault(
                f"latent cache damaged: {chunk} is missing or truncated; delete {self.folder} and run again"
            )
        content = np.memmap(chunk, np.uint8, "r")
        if not _checksum_agrees(content):
            raise DataFault(f"latent cache damaged: wrong checksum in {chunk}; delete {self.folder} and run again")
        return content[:num_bytes].view(dtype).reshape(shape)
