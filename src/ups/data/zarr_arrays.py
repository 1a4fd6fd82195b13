"""Latent arrays as zarr knows them: their metadata, and the codec of the differences as which latents are stored.

zarr finds the codec by the entry point in `pyproject.toml`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import zarr
from zarr.abc.codec import ArrayArrayCodec
from zarr.codecs import BloscCodec, Crc32cCodec, TransposeCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import NDBuffer, default_buffer_prototype
from zarr.registry import register_codec

from ups.data.latent_shards import Layout, from_differences, to_differences
from ups.errors import DataFault
from ups.files import publish

NAME = "ups.differences"


@dataclass(frozen=True)
class Differences(ArrayArrayCodec):
    """`to_differences` along `axis`, `count` times, of each piece."""

    axis: int
    count: int
    is_fixed_size: ClassVar[bool] = True

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """From its entry in `zarr.json`."""
        return cls(**data["configuration"])

    def to_dict(self) -> dict[str, Any]:
        """Its entry in `zarr.json`."""
        return {"name": NAME, "configuration": {"axis": self.axis, "count": self.count}}

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """As many bytes as before."""
        return input_byte_length

    async def _encode_single(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> NDBuffer:
        return self._apply(to_differences, chunk_array, chunk_spec)

    async def _decode_single(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> NDBuffer:
        return self._apply(from_differences, chunk_array, chunk_spec)

    def _apply(
        self, function: Callable[[np.ndarray, int, int], np.ndarray], chunk_array: NDBuffer, chunk_spec: ArraySpec
    ) -> NDBuffer:
        values = function(chunk_array.as_numpy_array(), self.axis, self.count)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(values)


register_codec(NAME, Differences)


def write_metadata(array: Path, layout: Layout) -> None:
    """Write `zarr.json`; with compression the attribute `scale_factor` says what the integers count.

    Raises:
        DataFault: there is one of another layout.
    """
    (k, t), (_, _, n, d) = layout.shard, layout.shape
    blosc = BloscCodec(cname="zstd", clevel=1, shuffle="bitshuffle", typesize=4)
    filters = [TransposeCodec(order=(0, 3, 1, 2)), Differences(*layout.differences)]
    created = zarr.create_array(
        zarr.storage.MemoryStore(), shape=layout.shape, shards=(k, t, n, d), chunks=(1, layout.piece, n, d),
        dtype="<f4" if layout.scale is None else "<i4", fill_value=0, filters=filters if layout.scale else None,
        compressors=[blosc, Crc32cCodec()] if layout.scale else Crc32cCodec(),
        attributes={"scale_factor": layout.scale} if layout.scale else None,
    )  # fmt: skip
    buffers = created.metadata.to_buffer_dict(default_buffer_prototype())
    path, content = array / "zarr.json", buffers["zarr.json"].to_bytes()
    if path.is_file():
        if path.read_bytes() != content:
            raise DataFault(f"latent cache damaged: {path} is of another array; delete {array} and run again")
        return
    with publish(path) as temporary:
        temporary.write_bytes(content)
