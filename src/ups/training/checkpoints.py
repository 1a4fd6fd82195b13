"""Checkpoints, written by a thread beside the training and read with verification of their hash."""

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ups.errors import DataFault
from ups.files import digest_of, manifest_of, publish, read_manifest, remove_leftovers, write_json
from ups.models.weights import load, tensor_bytes

log = logging.getLogger(__name__)

State = dict[str, Any]


def publish_tensors(path: Path, content: State, at: Callable[[str], object] = lambda point: None) -> None:
    """Write `path`, then `path`.json, its manifest {"sha256", "bytes"}: a file without manifest is incomplete.

    `at(point)` is called after each stage of the write; tests interrupt it there. Raises `StorageFault` if the disk is
    full or not writable; an earlier file of this name is then unchanged.
    """
    data = tensor_bytes(content)
    with publish(path) as temporary:
        at("write")
        temporary.write_bytes(data)
        at("written")
    at("renamed")
    write_json(manifest_of(path), {"sha256": hashlib.sha256(data).hexdigest(), "bytes": data.nbytes})


def read_tensors(path: Path) -> State:
    """Read what `publish_tensors` wrote; a file that is missing, damaged or holds anything else is a `DataFault`."""
    manifest = read_manifest(path)
    if not path.is_file() or path.stat().st_size != manifest["bytes"]:
        raise DataFault(f"{path} is missing or truncated")
    if digest_of(path) != manifest["sha256"]:
        raise DataFault(f"{path} was altered: its SHA-256 is not that of its manifest")
    return load(path)


class Checkpoints:
    """The newest `keep` states of a run, `folder`/step_<step>.pt; only one process writes them.

    `refused` lists why checkpoints were not used. `at(point, step)` is called between the stages of a save; tests kill
    the process there.
    """

    def __init__(self, folder: Path, keep: int, at: Callable[[str, int], object] = lambda point, step: None) -> None:
        self.folder, self.keep, self.at = folder, keep, at
        self.refused: list[str] = []
        self._writer = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, in order."""
        return sorted(int(path.name.removesuffix(".pt.json")[5:]) for path in self.folder.glob("step_*.pt.json"))

    def newest(self) -> tuple[int, State] | None:
        """Step and state of the newest intact checkpoint, None without any; raises `DataFault` if all are damaged."""
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
        """The state of one step; raises as `read_tensors`."""
        return read_tensors(self._path(step))

    def save(self, step: int, state: State) -> None:
        """Start to write `state`, whose tensors must not change any more; waits only for the previous save."""
        self.wait()
        self._pending = self._writer.submit(self._write, step, state)

    def wait(self) -> None:
        """Wait until the last save is on disk; raises the fault with which it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def failed(self) -> bool:
        """Whether the last save has failed; `wait` then raises its fault."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def clean(self) -> None:
        """Remove the incomplete files of a killed save."""
        remove_leftovers(self.folder)
        for path in self.folder.glob("step_*.pt"):
            if not manifest_of(path).is_file():
                path.unlink()

    def remove(self) -> None:
        """Delete all checkpoints, when the run is finished."""
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
        steps = self.steps()
        kept = [done for done in steps if done <= step][-self.keep :]
        for other in sorted({*steps} - {*kept}):  # later steps are refused ones, behind which training resumed
            self._remove(other)

    def _remove(self, step: int) -> None:
        # The manifest first: a kill in between leaves an incomplete checkpoint, not a damaged one.
        manifest_of(self._path(step)).unlink(missing_ok=True)
        self._path(step).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.pt"
