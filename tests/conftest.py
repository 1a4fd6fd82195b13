import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ups.data.families import Families

# Before torch is imported: small tensors lose more by waking threads than they gain.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def compiler() -> None:
    """Skip the test where there is no C++ compiler; any other reason why torch cannot compile fails it."""
    import torch

    from ups.training.update import why_not_compiled

    reason = why_not_compiled(torch.device("cpu"))
    if reason is not None and reason.startswith("InvalidCxxCompiler"):
        pytest.skip(reason)
    assert reason is None


@pytest.fixture
def families() -> "Iterator[Families]":
    """The table of families, which is again what it was after the test."""
    from ups.data.pdebench import FAMILIES

    before, stored = dict(FAMILIES), set(FAMILIES._stored)
    yield FAMILIES
    FAMILIES.clear()
    FAMILIES.update(before)
    FAMILIES._stored = stored
