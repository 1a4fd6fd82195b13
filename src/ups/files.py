"""Files that are either whole or absent: write beside, flush to disk, rename."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ups.errors import DataFault

BLOCK = 1 << 22


@contextmanager
def publish(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; on success flush it to disk and rename it to `path`, else remove it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; NaN and infinity are refused, for JSON has neither."""
    with publish(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read JSON; a missing or damaged file is a `DataFault` that names it."""
    if not path.is_file():
        raise DataFault(f"{path} does not exist yet: run the nodes before this one, or `kedro run --pipeline full`")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataFault(f"{path} is not valid JSON ({error}); delete it and run again") from error


def digest_of(path: Path, algorithm: str = "sha256") -> str:
    """Hexadecimal digest of a file, read in blocks."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
