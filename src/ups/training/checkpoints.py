"""Checkpoints: whole, hashed and written off the step's path; of the newest, the first that is intact is used."""

import hashlib
import logging
import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ups.errors import DataFault
from ups.files import digest_of, manifest_of, publish, read_json, remove_leftovers, write_json
from ups.models.weights import load, tensor_bytes

log = logging.getLogger(__name__)

State = dict[str, Any]


def publish_tensors(path: Path, content: State, at: Callable[[str], object] = lambda point: None) -> None:
    """Write `path`, then `path`.json, its manifest {"sha256", "bytes"}; readers trust the manifest alone.

    Raises:
        StorageFault: the disk is full or may not be written to; what was there before is untouched.
    """
    data = tensor_bytes(content)
    with publish(path) as temporary:
        at("write")
        temporary.write_bytes(data)
        at("written")
    at("renamed")
    write_json(manifest_of(path), {"sha256": hashlib.sha256(data).hexdigest(), "bytes": data.nbytes})


def read_tensors(path: Path) -> State:
    """Read what `publish_tensors` wrote.

    Raises:
        DataFault: the file is not what its manifest says.
    """
    manifest = read_json(manifest_of(path))
    if not isinstance(manifest, dict) or not path.is_file() or path.stat().st_size != manifest.get("bytes"):
        raise DataFault(f"{path} is missing or truncated")
    if digest_of(path) != manifest.get("sha256"):
        raise DataFault(f"{path} was altered: its SHA-256 is not that of its manifest")
    try:
        return load(path)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        raise DataFault(f"{path} does not hold tensors and plain values alone") from error


class Checkpoints:
    """The newest `keep` states of a run, `step_<step>.pt`, in a folder of their own; one writer.

    `at(point, step)` is called at each point of a save at which a kill must do no harm.
    """

    def __init__(self, folder: Path, keep: int, at: Callable[[str, int], object] = lambda point, step: None) -> None:
        self.folder, self.keep, self.at = folder, keep, at
        self.refused: list[str] = []
        self._writer = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def steps(self) -> list[int]:
        """The steps of which there is a manifest, in order."""
        return sorted(int(path.name.removesuffix(".pt.json")[5:]) for path in self.folder.glob("step_*.pt.json"))

    def newest(self) -> tuple[int, State] | None:
        """The newest intact state and its step; None where nothing was saved yet.

        Raises:
            DataFault: there are checkpoints, and none is intact.
        """
        for step in reversed(self.steps()):
            try:
                return step, self.read(step)
            except DataFault as fault:
                log.warning("checkpoint refused: %s", fault)
                self.refused.append(str(fault))
        if self.refused:
            raise DataFault(f"no checkpoint in {self.folder} is intact; delete the folder to start anew")
        return None

    def read(self, step: int) -> State:
        """The state of one step; refused as `read_tensors` does."""
        return read_tensors(self._path(step))

    def save(self, step: int, state: State) -> None:
        """Have `state` written; it must not change any more. Waits only for the save before this one."""
        self.wait()
        self._pending = self._writer.submit(self._write, step, state)

    def wait(self) -> None:
        """Until the last save is on disk; raises what it met."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def failed(self) -> bool:
        """Whether a save has ended with a fault, which `wait` raises."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def clean(self) -> None:
        """Remove what a killed save left."""
        if self.folder.is_dir():
            remove_leftovers(self.folder)
            for path in self.folder.glob("step_*.pt"):
                if not manifest_of(path).is_file():
                    path.unlink()

    def remove(self) -> None:
        """Delete all of them: the run is finished."""
        self.wait()
        self.clean()
        for step in self.steps():
            self._remove(step)
        if self.folder.is_dir():
            self.folder.rmdir()

    def _write(self, step: int, state: State) -> None:
        self.folder.mkdir(exist_ok=True)
        publish_tensors(self._path(step), state, lambda point: self.at(point, step))
        self.at("committed", step)
        for old in self.steps()[: -self.keep]:
            self._remove(old)

    def _remove(self, step: int) -> None:
        manifest_of(self._path(step)).unlink(missing_ok=True)
        self._path(step).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.pt"
