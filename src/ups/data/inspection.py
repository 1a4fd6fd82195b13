"""First reading of HDF5 files of unknown origin, in a child process with limits of time and memory.

HDF5 itself crashes, hangs or exhausts the memory on some damaged files. The child that reads such a file dies, which is
a fault in one line; what it has read without a fault can be read in this process afterwards. Request and answer are
JSON, one line each; between them the child names each file that it opens and counts the trajectories it has read.
"""

import io
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ups.data import hdf5
from ups.data.families import Dataset, Family, Subsample
from ups.data.hdf5 import WRITE_PLAIN, file_fault
from ups.data.pdebench import FAMILIES
from ups.errors import KINDS, Fault

log = logging.getLogger(__name__)

CPU_SECONDS = 5  # from one access to a file to the next
MEMORY_BYTES = 5 * 2**30  # address space of the child
SLOW = f"took more than {CPU_SECONDS} seconds of computing for one access"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HDF5_PLUGIN_PATH": ""}

Advance = Callable[[int], object]
Subsamples = dict[str, dict[str, Any]]
"""Options of `Subsample` by family."""
Fetch = Callable[[int, int], bytes]
"""Bytes of a remote file, between two positions; may raise a fault."""


def inspect(task: str, advance: Advance | None = None, fetch: Fetch | None = None, **request: Any) -> Any:
    """The answer of the function `task` of this module to `request`; `advance(1)` follows each trajectory read.

    Raises:
        Fault: that of the task.
        DataFault: a file is refused, or the child that read it died or reached a limit.
    """
    command = [sys.executable, "-P", "-m", __name__, task]
    definitions = [family.definition for family in FAMILIES.defined]
    request_line = json.dumps({"definitions": definitions} | request, default=str)
    with tempfile.TemporaryFile("w+") as output:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": output, "encoding": "utf-8"}
        with subprocess.Popen(command, env=os.environ | ENVIRONMENT, **pipes) as child:
            try:
                answer, path = _converse(child, request_line, advance, fetch)
            finally:
                child.kill()
                with suppress(BrokenPipeError):
                    child.stdin.close()
        if "result" in answer:
            return answer["result"]
        if "fault" in answer:
            raise KINDS[answer["kind"]](answer["fault"])
        if "no_memory" in answer:
            raise file_fault(path, f"needs more than {MEMORY_BYTES / 2**30:g} GiB of memory to be read")
        if child.returncode > 0:  # a Python error: a defect of this project
            output.seek(0)
            raise RuntimeError(f"inspection of {path}: {output.read()[-4000:]}")
    name = signal.Signals(-child.returncode)
    if name == signal.SIGPROF:
        raise file_fault(path, SLOW, f"download it again, or {WRITE_PLAIN}, or with chunks of one trajectory")
    raise file_fault(path, f"crashed HDF5 ({name.name}), so it is damaged")


def _converse(
    child: subprocess.Popen, request: str, advance: Advance | None, fetch: Fetch | None
) -> tuple[dict[str, Any], str]:
    """The child's answer, empty if it died, and the last file that it opened."""
    assert child.stdout is not None
    message: dict[str, Any] = {}
    path = ""
    _tell(child, request)
    for line in child.stdout:
        message = json.loads(line)
        path = message.get("file", path)
        if "warning" in message:
            log.warning("%s", message["warning"])
        if "advance" in message and advance is not None:
            advance(message["advance"])
        if "fetch" in message and fetch is not None:
            _tell(child, b64encode(fetch(*message["fetch"])).decode())
    child.wait()
    return message if child.returncode == 0 else {}, path


def _tell(child: subprocess.Popen, line: str) -> None:
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # a child that is dead already is reported by its end
        child.stdin.write(f"{line}\n")
        child.stdin.flush()


def recognize(folder: str, names: list[str]) -> dict[str, Any]:
    """The family of each of the files `names`, and the definitions of those that are not PDEBench's."""
    from ups.data.arrays import open_data
    from ups.data.recognition import family_of

    families = {}
    for path in (Path(folder) / name for name in names):
        with open_data(path) as file:
            families[path.name] = family_of(file, path).name
    return {"families": families, "definitions": [family.definition for family in FAMILIES.defined]}


def examine(path: str, family: str | None) -> dict[str, Any]:
    """What is understood of one file, and what is wrong with it, see `ups.data.own.examine`."""
    from ups.data.own import examine

    facts, problems = examine(Path(path), family)
    return {"facts": facts, "problems": problems}


def describe(folder: str, names: list[str], subsample: Subsamples, **fractions: Any) -> dict[str, Any]:
    """The datasets of the files `names` and their splits, as JSON.

    Initial states are compared on all points of the first snapshots, so that splits do not depend on strides.
    """
    from ups.data.recognition import warn_of_chunks, warn_of_lengths
    from ups.data.splits import split
    from ups.data.trajectories import find_datasets, name_variants

    taken, thinned = _subsample(Path(folder), find_datasets(Path(folder), names), subsample)
    named = name_variants(thinned)
    warn_of_lengths(named.values())
    warn_of_chunks(Path(folder), named.values())
    return {"datasets": _as_json(named), "splits": split(Path(folder), taken, **fractions)}


def find(folder: str, names: list[str], subsample: Subsamples) -> dict[str, Any]:
    """The datasets of the files `names`, as JSON."""
    from ups.data.trajectories import find_datasets

    return _as_json(_subsample(Path(folder), find_datasets(Path(folder), names), subsample)[1])


def describe_file(path: str, family: str | None) -> dict[str, Any]:
    """The dataset of one file, as JSON; `family` instead of that which its name matches; and own families."""
    from ups.data.trajectories import inspect_file

    dataset = asdict(inspect_file(Path(path), family))
    return {"dataset": dataset, "definitions": [family.definition for family in FAMILIES.defined]}


def _subsample(folder: Path, datasets: dict[str, Dataset], subsample: Subsamples) -> tuple[dict, dict]:
    """The datasets with their first trajectories, and these with every k-th point and snapshot."""
    from ups.data.trajectories import take_first, thin

    options = {name: Subsample(**subsample[dataset.family]) for name, dataset in datasets.items()}
    taken = {name: take_first(dataset, options[name]) for name, dataset in datasets.items()}
    return taken, {name: thin(folder, dataset, options[name]) for name, dataset in taken.items()}


def _as_json(datasets: dict[str, Dataset]) -> dict[str, Any]:
    return {name: asdict(dataset) for name, dataset in datasets.items()}


def fit(folder: str, datasets: dict[str, Any], splits: dict[str, dict[str, list[int]]]) -> dict[str, Any]:
    """The statistics of described datasets, all values of which are checked."""
    from ups.data.normalization import fit_normalization

    described = {name: Dataset.from_json(entry) for name, entry in datasets.items()}
    return fit_normalization(Path(folder), described, splits, lambda count: _say(advance=count))


def check(folder: str, dataset: dict[str, Any]) -> None:
    """Check all values of a described dataset."""
    from ups.data.normalization import check_values

    check_values(Path(folder), Dataset.from_json(dataset), lambda count: _say(advance=count))


def fields(path: str, family: str, start: int) -> None:
    """Read what predictions from the snapshot `start` need of every trajectory of a file: it, and the one before."""
    from ups.data.field_files import open_fields
    from ups.data.pdebench import FAMILIES

    with open_fields(Path(path), FAMILIES[family]) as file:
        time = start % (file.first.times or 1)
        for row in range(file.first.count):
            for each in {time, max(time - 1, 0)}:
                file.states(range(row, row + 1), each)
            file.read_coefficients(range(row, row + 1))


def marker(path: str) -> str | None:
    """Origin of a partial file, None for a whole one."""
    from ups.data.partial import read_marker

    return read_marker(Path(path))


def structure(url: str, size: int, file: dict[str, Any], positions: list[int]) -> dict[str, Any]:
    """Structure of the file with some trajectories of a remote one, see `partial.read_structure`."""
    from ups.data.partial import read_structure
    from ups.data.published import PublishedFile

    return read_structure(FetchedFile(url, size), PublishedFile(**file), positions)


TASKS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (recognize, examine, describe, describe_file, find, fit, check, fields, marker, structure)
}


class FetchedFile(io.RawIOBase):
    """A remote file whose bytes the parent fetches; h5py names it by its `repr`."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._position = url, size, 0

    def __repr__(self) -> str:
        return self._url

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        stop = min(self._position + len(buffer), self._size)
        if stop <= self._position:
            return 0
        _say(fetch=[self._position, stop])
        block = b64decode(sys.stdin.readline())
        buffer[: len(block)] = block
        self._position += len(block)
        return len(block)


class Warnings(logging.Handler):
    """Sends warnings to the parent, whose log is seen."""

    def emit(self, record: logging.LogRecord) -> None:
        """Send one line."""
        _say(warning=record.getMessage())


def _say(**message: Any) -> None:
    """Send one line to the parent."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _limit_access() -> None:
    """Set the limits of this process; from now on the parent is told the file of every access."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere the limit is refused or has no effect
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    current = ""

    def watch(path: str) -> None:
        nonlocal current
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        if path != current:
            current = path
            _say(file=path)

    hdf5.before_access = watch


def _answer(task: str, request: dict[str, Any]) -> None:
    try:
        FAMILIES.define(*(Family(**definition) for definition in request.pop("definitions")))
        _say(result=TASKS[task](**request))
    except Fault as fault:
        _say(fault=str(fault), kind=type(fault).__name__)
    except MemoryError:
        _say(no_memory=True)


if __name__ == "__main__":
    _limit_access()
    logging.getLogger("ups").addHandler(Warnings(logging.WARNING))
    _answer(sys.argv[1], json.loads(sys.stdin.readline()))
    os._exit(0)  # at its end the interpreter would free what HDF5 has left of a damaged file, and might crash
