"""The child process that reads files of unknown origin first: same answers, and a death in one line."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.data.conftest import NAMES, write_file
from ups.config import WHOLE
from ups.data import inspection
from ups.data.families import Dataset
from ups.data.inspection import CPU_SECONDS, inspect
from ups.data.normalization import fit_normalization
from ups.data.splits import split
from ups.data.trajectories import find_datasets
from ups.errors import ConfigFault, DataFault, Fault, StorageFault

log = logging.getLogger(__name__)

FRACTIONS = {"seed": 3, "valid_fraction": 0.25, "test_fraction": 0.25}
SEED = 0
# Mutated files per run of the fuzz test; the bar is 5,000.
MUTATIONS = int(os.environ.get("UPS_MUTATIONS", "150"))
HANG_SECONDS = 30  # far above the limit of computing time, for a machine that does something else besides


def describe(path: Path) -> dict:
    """The description of one file by the child process."""
    return inspect("describe", folder=path.parent, names=[path.name], subsample=WHOLE.of(NAMES), **FRACTIONS)


@pytest.mark.parametrize("family", NAMES)
def test_child_answers_as_this_process(tmp_path: Path, family: str):
    """Datasets, splits and statistics from the child process are those computed here, in every layout."""
    path = write_file(tmp_path, family)
    datasets = find_datasets(tmp_path, [path.name])
    splits, counts = split(tmp_path, datasets, 3, 0.25, 0.25), []
    described = describe(path)
    assert {name: Dataset.from_json(entry) for name, entry in described["datasets"].items()} == datasets
    assert described["splits"] == splits
    statistics = inspect("fit", counts.append, folder=tmp_path, **described)
    assert statistics == fit_normalization(tmp_path, datasets, splits, lambda count: None) and counts == [1] * 4


def test_refusal_reaches_the_parent(tmp_path: Path):
    """A fault in the child process is raised here with the same line."""
    path = write_file(tmp_path, "advection_1d", edit=lambda file: file.__delitem__("tensor"))
    with pytest.raises(DataFault, match=rf"{path.name}: has no 'tensor'"):
        describe(path)


def test_values_are_checked_in_the_child(tmp_path: Path):
    """A value that is not finite is refused by the child that checks all values."""
    path = write_file(tmp_path, "advection_1d", edit=lambda file: file["tensor"].__setitem__((2, 1, 3), np.nan))
    (dataset,) = find_datasets(tmp_path, [path.name]).values()
    with pytest.raises(DataFault, match="trajectory 2, snapshot 1, is NaN"):
        inspect("check", folder=tmp_path, dataset=asdict(dataset))


DEATHS = {
    "SIGSEGV": "crashed HDF5 \\(SIGSEGV\\)",
    "SIGABRT": "crashed HDF5 \\(SIGABRT\\)",
    "SIGPROF": f"took more than {CPU_SECONDS} seconds of computing for one access; .* chunks of one trajectory",
}


@pytest.mark.parametrize("name", DEATHS)
def test_death_of_the_child_is_one_line(fake_child, name: str):
    """A child process that is killed ends in one line that names the file it was reading."""
    fake_child(
        f"print(json.dumps({{'file': 'first.hdf5'}}), json.dumps({{'file': 'data.hdf5'}}), sep='\\n', flush=True)\n"
        f"os.kill(os.getpid(), signal.{name})"
    )
    with pytest.raises(DataFault, match=rf"^data\.hdf5: {DEATHS[name]}[^\n]*$"):
        inspect("describe")


@pytest.mark.parametrize("kind", [ConfigFault, DataFault, StorageFault])
def test_fault_of_the_child_keeps_its_kind(fake_child, kind: type[Fault]):
    """A fault in the child process ends the command with the exit code that it has everywhere."""
    fake_child(f"print(json.dumps({{'fault': 'a: full; free space', 'kind': {kind.__name__!r}}}))")
    with pytest.raises(kind, match=r"^a: full; free space$"):
        inspect("describe")


def test_defect_in_the_child_is_ours(fake_child):
    """An error of Python in the child process is no fault of the file, and its traceback is kept."""
    fake_child("raise ZeroDivisionError('here')")
    with pytest.raises(RuntimeError, match="ZeroDivisionError: here"):
        inspect("describe")


def limited(code: str) -> subprocess.CompletedProcess:
    """Run code in a process with the limits of the child process."""
    code = f"from ups.data import hdf5, inspection\ninspection._limit_access()\n{code}"
    environment = os.environ | inspection.ENVIRONMENT | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)


def test_child_that_computes_too_long_is_killed():
    """Without a further access to a file the process ends after its limit of computing time; with some it goes on."""
    pause = "until = time.process_time() + inspection.CPU_SECONDS"
    code = f"import time\ninspection.CPU_SECONDS = 1\nfor i in range(3):\n hdf5.before_access('a')\n {pause} - 0.5"
    completed = limited(f"{code}\n while time.process_time() < until: pass\nhdf5.before_access('a')\nwhile True: pass")
    assert completed.returncode == -signal.SIGPROF and completed.stdout == '{"file": "a"}\n'


def test_child_imports_little(tmp_path: Path):
    """A description needs NumPy and h5py, whose import is what a child costs, and no other large library."""
    request = {"folder": str(tmp_path), "names": [write_file(tmp_path, "advection_1d").name], **FRACTIONS}
    request |= {"subsample": {"advection_1d": {}}, "definitions": []}
    large = {"pydantic", "requests", "scipy", "torch"}
    code = f"import sys\ninspection._answer('describe', {request})\nprint({large} & set(sys.modules))"
    assert limited(code).stdout.splitlines()[-1] == "set()"


def test_child_has_limited_memory():
    """An array beyond the limit cannot be allocated, one of a quarter of it can."""
    allocate = "np.empty(inspection.MEMORY_BYTES{}, np.int8)"
    completed = limited(f"import numpy as np\n{allocate.format(' // 4')}\n{allocate.format('')}")
    assert completed.returncode == 1 and "line 5" in completed.stderr and "MemoryError" in completed.stderr


TEXTS = {
    "10 MB of text": "x" * 10_000_000,
    "60 kB of fixed length": np.bytes_(b"x" * 60_000),
    "script": np.bytes_(b"<script>alert(1)</script>"),
    "escape codes": np.bytes_(b"\x1b[2J\x1b]0;title\x07"),
    "remote image": np.bytes_(b"![](https://example.org/pixel.png)"),
    "break": np.bytes_(b"trajectories 0-3 of 9 of a.hdf5, MD5 0\n# Heading"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_of_a_file_is_refused_unless_it_is_ours(tmp_path: Path, name: str):
    """The origin of a partial file has an exact form: no other text from a file reaches a card or a message."""
    path = write_file(tmp_path, "advection_1d", edit=lambda file: file.attrs.update(ups_partial=TEXTS[name]))
    with pytest.raises(DataFault, match="attribute 'ups_partial'") as caught:
        inspect("marker", path=path)
    assert len(str(caught.value)) < 400 and str(caught.value).isprintable()


def test_long_names_are_cut(tmp_path: Path):
    """Names and types of a file may be long and hold escape codes: the line that shows them is short and printable."""

    def edit(file: h5py.File) -> None:
        del file["tensor"]
        file["a" * 60_000], file["\x1b[2J"] = 1, 2

    with pytest.raises(DataFault, match="has no 'tensor'") as caught:
        describe(write_file(tmp_path, "advection_1d", edit=edit))
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()


def test_fault_has_no_escape_codes(tmp_path: Path):
    """A character that a terminal obeys is shown as its code."""
    assert str(DataFault("a\x1b[2Jb\u202ec: no\nsuch")) == "a\\x1b[2Jb\\u202ec: no\nsuch"


def mutate(content: bytes, generator: np.random.Generator) -> bytes:
    """The file with one to eight bytes changed, most of them in its first 8 KiB, or cut off."""
    damaged = bytearray(content)
    for _ in range(generator.integers(1, 9)):
        end = min(len(damaged), 8192) if generator.random() < 0.8 else len(damaged)
        damaged[generator.integers(end)] = generator.choice([0, 1, 127, 128, 255, generator.integers(256)])
    return bytes(damaged[: generator.integers(len(damaged))] if generator.random() < 0.05 else damaged)


@pytest.mark.faults
@pytest.mark.parametrize("family", NAMES)
def test_mutated_files_are_read_or_refused(tmp_path: Path, family: str):
    """No damaged file crashes or stops this process: it is read, or refused in one line."""
    path, generator = write_file(tmp_path, family, grid=(8, 6, 4)), np.random.default_rng([SEED, *family.encode()])
    content = path.read_bytes()
    outcomes, slowest = Counter(), 0.0
    for _ in range(MUTATIONS // len(NAMES)):
        path.write_bytes(mutate(content, generator))
        started = time.monotonic()
        try:
            inspect("fit", folder=tmp_path, **describe(path))
            outcomes["read"] += 1
        except DataFault as fault:
            assert "\n" not in str(fault) and str(path) in str(fault)
            outcomes[
                next((word for word in ("SIG", "seconds of computing", "GiB") if word in str(fault)), "refused")
            ] += 1
        slowest = max(slowest, time.monotonic() - started)
    log.info("%s: %s, slowest %.1f s", family, dict(outcomes), slowest)
    assert slowest < HANG_SECONDS
