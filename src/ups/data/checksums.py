"""MD5 sums of files of any size."""

import hashlib
from collections.abc import Callable
from pathlib import Path

BLOCK_BYTES = 2**20


def md5_of(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """MD5 of a file in hexadecimal, read block by block; `advance` takes the bytes of each."""
    md5 = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            md5.update(block)
            if advance is not None:
                advance(len(block))
    return md5.hexdigest()
