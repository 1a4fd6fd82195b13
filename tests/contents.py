"""Equal predictions; wrong contents of JSON files, and what is expected of whoever reads them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ups.errors import DataFault


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Two predictions of the same models: equal bit for bit on a CPU, within rounding on a GPU."""
    np.testing.assert_allclose(found, expected, rtol=1e-6 if torch.cuda.is_available() else 0.0, atol=0.0)


def wrong_contents(good: bytes, fields: tuple[str, ...], of_each_file: bool) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of damaged versions of a file; `fields` are those of the whole, or of an entry in it."""
    yield from {"empty": b"", "list": b"[1]", "number": b"3", "null": b"null", "truncated": good[:-3]}.items()
    yield from {"not UTF-8": good.replace(b'"', b'"\xff', 1), "nested": b'{"a":' * 100_000}.items()
    yield from {"NaN": b'{"a": NaN}', "long number": b'{"a": ' + b"9" * 5000 + b"}"}.items()
    for field in fields:
        for name, change in (("no", {}), ("wrong", {field: [1]})):
            content = json.loads(good)
            records: list[dict[str, Any]] = list(content.values()) if of_each_file else [content]
            for record in records:
                del record[field]
                record.update(change)
            yield f"{name} {field}", json.dumps(content).encode()


def expect_one_line(
    path: Path, read: Callable[[], object], fields: tuple[str, ...] = (), *, of_each_file: bool = False
) -> None:
    """Every wrong content of a file, now sound, is a fault in one line that names the file and the remedy."""
    for name, content in wrong_contents(path.read_bytes(), fields, of_each_file):
        path.write_bytes(content)
        with pytest.raises(DataFault) as caught:
            read()
        line = str(caught.value)
        assert line.startswith(f"{path} is ") and line.endswith("; delete it and run again"), name
        assert line.isprintable() and len(line) < 400, name
