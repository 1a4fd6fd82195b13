"""Where jobs keep compiled code, and what a killed compilation leaves there."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from ups.runs.compiler_caches import CACHES, compiler_caches, remove_unfinished

COMPILE = """
import torch
print(torch.compile(lambda x: (x + 1).sin().sum())(torch.zeros(8)).item())
"""
# In place of the C++ compiler. Where the file KILL exists it leaves the library empty and kills the process that waits.
KILLER = """#!/bin/sh
case "$*" in *.main.so*)
    if [ -e "$KILL" ]; then
        for word; do case "$word" in *.main.so) : > "$word";; esac; done
        kill -9 $PPID
    fi
esac
exec g++ "$@"
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with the folder and the lock of a library that is being built."""
    for folder in ("bf/abc.main_CxxBuild", "locks"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("abc.main.so", "abc.main.cpp", "other.main.so"):
        (tmp_path / "bf" / name).touch()
    return tmp_path


def names(cache: Path) -> set[str]:
    """Files and folders beside the unfinished library."""
    return {path.name for path in (cache / "bf").iterdir()}


def test_compiled_code_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Compiled code lies below the data root, one place for all stages, closed to other users."""
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".compiled").mkdir(mode=0o777)
    folders = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    assert compiler_caches(tmp_path) == {name: str(tmp_path / ".compiled" / folders[name]) for name in folders}
    for folder in ("", *folders.values()):
        assert stat.S_IMODE((tmp_path / ".compiled" / folder).stat().st_mode) == 0o700


def test_a_chosen_cache_is_kept(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    """A cache that the user has named in the environment is used, without what is unfinished in it."""
    for name in CACHES:
        monkeypatch.setenv(name, str(cache))
    assert compiler_caches(tmp_path / "data") == {} and not (tmp_path / "data").exists()
    assert names(cache) == {"abc.main.cpp", "other.main.so"}


def test_unfinished_libraries_are_removed(cache: Path):
    """The library beside whose folder nobody works goes with the folder; its source and other libraries stay."""
    remove_unfinished(cache)
    assert names(cache) == {"abc.main.cpp", "other.main.so"}


def test_what_another_job_builds_stays(cache: Path):
    """Torch holds the lock of a library while it is built."""
    before = names(cache)
    with FileLock(cache / "locks" / "abc.lock"):
        remove_unfinished(cache)
    assert names(cache) == before


@pytest.mark.faults
@pytest.mark.usefixtures("compiler")
def test_compiling_after_a_kill(tmp_path: Path):
    """Torch itself fails for ever after a kill while it compiled; without the unfinished library it compiles again."""
    (tmp_path / "killer").write_text(KILLER)
    (tmp_path / "killer").chmod(0o700)
    kill, cache = tmp_path / "kill", tmp_path / "cache"
    changes = {"CXX": str(tmp_path / "killer"), "KILL": str(kill), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    variables = os.environ | changes | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}

    def compiled() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", COMPILE], env=variables, capture_output=True, text=True)

    kill.touch()
    assert compiled().returncode == -9
    kill.unlink()
    assert "file too short" in compiled().stderr
    remove_unfinished(cache)
    assert float(compiled().stdout) == pytest.approx(8 * 0.841471, rel=1e-5)
