import subprocess
import sys

import pytest

SLOW = [
    "h5py",
    "zarr",
    "scipy",
    "matplotlib",
    "mlflow",
    "kedro",
    "requests",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "sympy",
]


@pytest.mark.parametrize("module", ["loop", "stages", "worker"])
def test_training_starts_without_what_it_does_not_use(module: str):
    """A training process on latents imports torch and little else: none of what only other nodes or the codec need."""
    script = f"import sys, ups.training.{module}; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert [name for name in SLOW if name in output.stdout.split()] == []
