"""Memory of a process."""

import sys
from pathlib import Path

import pytest

from ups.runs.processes import release_memory

BLOCK, NUM_BLOCKS = 100_000, 2_000  # bytes: smaller than what glibc maps, and gives back, one by one


def anonymous_bytes() -> int:
    """Private resident memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_goes_back():
    """Also that below a block that is still in use, which a heap cannot return by getting shorter."""
    blocks = [bytearray(b"x") * BLOCK for _ in range(NUM_BLOCKS)]
    last = blocks[-1]
    del blocks
    kept = anonymous_bytes()
    release_memory()
    assert len(last) == BLOCK
    assert kept - anonymous_bytes() > BLOCK * NUM_BLOCKS / 2
