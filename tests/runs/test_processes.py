"""Memory of a process: what it may use, and what it gives back."""

import sys
from pathlib import Path

import pytest
import torch

from ups.runs import processes
from ups.runs.processes import free_memory_bytes, is_out_of_memory, release_memory, use_whole_float32

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


def write_cgroup(folder: Path, most: str, used: int, files: int) -> None:
    """The files of a cgroup that uses some bytes, part of them as page cache."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"anon {used - files}\nactive_file {files // 4}\ninactive_file {files * 3 // 4}\n"
    )


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        (("4000", 3900, 3600), ("max", 3900, 3600), 3700),
        (("max", 3900, 3600), ("1000", 900, 400), 500),
        (("400", 300, 0), ("1000", 300, 0), 100),
        (("400", 500, 0), ("max", 300, 0), 0),
    ],
    ids=["page cache", "inner", "outer", "none left"],
)
def test_cgroups_limit_what_is_free(
    outer: tuple[str, int, int], inner: tuple[str, int, int], expected: int, tmp_path: Path, monkeypatch
):
    """Of a container and the job in it the tighter limit holds; files that the kernel can drop are free memory."""
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/elsewhere\n0::/slurm/job_7\n")
    monkeypatch.setattr(processes, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(processes, "OWN_CGROUP", own)
    write_cgroup(tmp_path / "groups", *outer)
    write_cgroup(tmp_path / "groups/slurm/job_7", *inner)
    assert free_memory_bytes(torch.device("cpu")) == expected


def test_without_cgroups_the_memory_of_the_machine_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on systems other than Linux."""
    monkeypatch.setattr(processes, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(processes, "OWN_CGROUP", tmp_path / "own")
    assert free_memory_bytes(torch.device("cpu")) > 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_failed_allocations_are_recognized(error: Exception, expected: bool):
    """Those of torch, and of the libraries it calls, which have no type of their own."""
    assert is_out_of_memory(error) == expected


def test_convolutions_on_gpus_are_not_rounded():
    """As products of matrices are not by default."""
    use_whole_float32()
    assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
