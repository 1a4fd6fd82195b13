"""Files that are whole or absent."""

import hashlib
import math
from pathlib import Path

import pytest

from ups.errors import DataFault
from ups.files import digest_of, publish, read_json, write_json


def test_published_file_replaces_the_old_one(tmp_path: Path):
    """What was written under the temporary name becomes the file, and folders are made as needed."""
    path = tmp_path / "a" / "b" / "result.txt"
    for content in ("old", "new"):
        with publish(path) as temporary:
            temporary.write_text(content)
            assert temporary.parent == path.parent
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_failure_leaves_the_old_file(tmp_path: Path, error: type[BaseException]):
    """A write that fails half way leaves the old content and no temporary file."""
    path = tmp_path / "result.txt"
    path.write_text("old")
    with pytest.raises(error), publish(path) as temporary:
        temporary.write_text("hal")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_appears_before_the_end(tmp_path: Path):
    """Readers never see a file that is still being written."""
    path = tmp_path / "result.txt"
    with publish(path) as temporary:
        temporary.write_text("hal")
        assert not path.exists()
    assert path.exists()


def test_json_round_trip(tmp_path: Path):
    """What is written is what is read, to the last digit."""
    content = {"a": [1, 0.1 + 0.2, None, True], "µ": {"b": "ü"}, "tiny": 5e-324}
    write_json(tmp_path / "a.json", content)
    assert read_json(tmp_path / "a.json") == content


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_write_json_refuses_what_json_lacks(tmp_path: Path, value: float):
    """NaN and infinity are refused and the old file stays."""
    path = tmp_path / "a.json"
    write_json(path, {"loss": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": [value]})
    assert read_json(path) == {"loss": 1.0}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", '{"a": 1', "{'a': 1}", '{"a": 1} }', "\xff"])
def test_read_json_names_the_damaged_file(tmp_path: Path, text: str):
    """A file that is not JSON is a data fault with its path and the remedy."""
    path = tmp_path / "broken.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataFault, match=r"broken\.json is not valid JSON .*delete it and run again"):
        read_json(path)


@pytest.mark.parametrize("algorithm", ["sha256", "md5"])
@pytest.mark.parametrize("size", [0, 1, 2**18 - 1, 2**18, 2**18 + 1, 2**20])
def test_digest_of(tmp_path: Path, algorithm: str, size: int):
    """The digest is that of the whole content, whether it fills its last block or not."""
    path, content = tmp_path / "data.bin", bytes(range(256)) * (size // 256) + bytes(size % 256)
    path.write_bytes(content)
    assert digest_of(path, algorithm) == hashlib.new(algorithm, content).hexdigest()
