import os

import pytest

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
