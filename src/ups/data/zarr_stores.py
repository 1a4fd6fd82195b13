"""Stores of zarr of unknown origin: no codec that could run code, the names of axes, and chunks without a file."""

import base64
import json
import logging
import math
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ups.data import hdf5
from ups.files import files_in

log = logging.getLogger(__name__)

MOST_FILES = 2_000  # in one access: a store may have a chunk for every snapshot
MAX_METADATA_BYTES = 2**24  # of one array in zarr
# Codecs of zarr that only compress or reorder bytes; others may run code, as that for pickled objects does.
CODECS = {"bytes", "blosc", "crc32c", "gzip", "lz4", "sharding_indexed", "transpose", "zlib", "zstd"}
MISSING = (
    "%s: of %r chunks without a file, %d in number, are read as %g: they hold nothing else, or were lost; "
    "compare with the original, or write it with write_empty_chunks"
)


def open_zarr(path: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a zarr store, a single one under `name`, and the attributes; raises errors in `DAMAGE`."""
    refuse_code(path)
    import zarr  # takes a second

    opened = zarr.open(path, mode="r")
    arrays = {name: opened} if isinstance(opened, zarr.Array) else dict(opened.arrays())
    for each, array in arrays.items():
        hdf5.expect_values(each, _encoding(array))
        if array.dtype.kind == "f" and array.ndim > 1 and (num_missing := _count_missing(path / array.path, array)):
            _warn_of_missing(path, each, num_missing, float(array.fill_value or 0))
    return arrays, dict(opened.attrs)


def _encoding(array: Any) -> dict[str, Any]:
    """The attributes of an array; xarray writes markers of missing values as the fill value of zarr 2, or in base64."""
    attributes = dict(array.attrs)
    if isinstance(text := attributes.get("_FillValue"), str):
        (attributes["_FillValue"],) = struct.unpack("<d", base64.standard_b64decode(text))
    is_marker = array.metadata.zarr_format == 2 and "_ARRAY_DIMENSIONS" in attributes and array.fill_value != 0
    return attributes | ({"_FillValue": array.fill_value} if is_marker and array.fill_value is not None else {})


def files_of(folder: Path) -> Iterator[Path]:
    """All files of a store, in a fixed order; each part of them is one access, which may take a limited time."""
    for number, path in enumerate(files_in(folder)):
        if number % MOST_FILES == 0:
            hdf5.before_access(str(folder))
        yield path


def read_blocks(path: Path, array: Any, indices: list[tuple[Any, ...]]) -> Iterator[np.ndarray]:
    """The values of an array at some indices; each access reads some files alone."""
    rows = array.shape[0] if array.shape else 1
    num_chunks = math.prod(-(-n // size) for n, size in zip(array.shape, array.chunks, strict=True))
    step = max(1, rows * MOST_FILES // max(1, num_chunks))
    for index in indices:
        if index != (slice(None),) or rows <= step:
            yield np.asarray(array[index])
            continue
        values = np.empty(array.shape, array.dtype)
        for first in range(0, rows, step):
            hdf5.before_access(str(path))
            values[first : first + step] = array[first : first + step]
        yield values


def _count_missing(folder: Path, array: Any) -> int:
    """Chunks, or shards, that have no file; `nchunks_initialized` of zarr takes the square of the time."""
    sizes = zip(array.shape, array.shards or array.chunks, strict=True)
    names = (each.name for each in files_of(folder))
    num_stored = sum(name != "zarr.json" and not name.startswith(".") for name in names)
    return max(0, math.prod(-(-n // max(1, size)) for n, size in sizes) - num_stored)


@cache
def _warn_of_missing(path: Path, name: str, num_missing: int, value: float) -> None:
    """Warn once: zarr leaves out chunks of this value alone, such as a field at rest, so that they may be no loss."""
    log.warning(MISSING, path, name, num_missing, value)


def refuse_code(path: Path) -> None:
    """Refuse a zarr store with a codec that is not in `CODECS`, before zarr reads it, by a ValueError."""
    for file in (each for each in files_of(path) if each.name in ("zarr.json", ".zarray", ".zmetadata")):
        if file.stat().st_size > MAX_METADATA_BYTES:
            raise ValueError(f"{file.name} is absurdly large")
        metadata = json.loads(file.read_bytes())
        if file.name == ".zmetadata":  # attributes of the user may have any names
            metadata = [each for name, each in metadata["metadata"].items() if not name.endswith(".zattrs")]
        unknown = sorted(_codecs_in(metadata) - CODECS)
        if unknown:
            raise ValueError(f"the codec {unknown[0]!r} is not read, only {', '.join(sorted(CODECS))}")


def _codecs_in(metadata: Any) -> set[str]:
    """Names of all codecs in metadata: `codecs` and `index_codecs` of zarr 3, `filters` and `compressor` of zarr 2."""
    if isinstance(metadata, list):
        return set().union(*map(_codecs_in, metadata))
    if not isinstance(metadata, dict):
        return set()
    named = [*metadata.get("codecs", []), *metadata.get("index_codecs", []), *(metadata.get("filters") or [])]
    named += [metadata["compressor"]] if metadata.get("compressor") else []
    names = {str(codec.get("name", codec.get("id"))) if isinstance(codec, dict) else str(codec) for codec in named}
    # Those of a node, in zarr 3, are of the user; without a type of node it is an array of this name.
    of_user = {"attributes"} if metadata.get("node_type") in ("array", "group") else set()
    return names.union(*(_codecs_in(value) for key, value in metadata.items() if key not in of_user))


def axes_of(array: Any) -> tuple[str, ...] | None:
    """The names of the axes of an array of zarr, of version 3 or as xarray writes them in version 2."""
    names = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS")
    return tuple(str(name or "") for name in names) if names else None
