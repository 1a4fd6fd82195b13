"""Checkpoints and latents are whole or refused, whatever happened to their files."""

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.jobs import launched
from ups.config import LatentsConfig
from ups.data.latent_cache import LatentCache
from ups.errors import DataFault, StorageFault
from ups.files import read_json
from ups.pipelines.training import encode_latents
from ups.training.checkpoints import Checkpoints, publish_tensors, read_tensors

STEPS = (4, 8, 12)
POINTS = ("write", "written", "renamed", "committed")
SEEDS = range(200)


def state_of(step: int) -> dict[str, Any]:
    """The state that was saved at a step."""
    generator = torch.Generator().manual_seed(step)
    return {"update": {"model": {"weight": torch.randn(40, 3, generator=generator)}}, "progress": {"step": step}}


def saved(folder: Path, keep: int = 3) -> Checkpoints:
    """A folder with the states of three steps."""
    checkpoints = Checkpoints(folder, keep)
    for step in STEPS:
        checkpoints.save(step, state_of(step))
    checkpoints.wait()
    return checkpoints


def is_true(state: dict[str, Any]) -> bool:
    """Whether a state is one that was saved, at the step that it names."""
    step = state["progress"]["step"]
    return step in STEPS and torch.equal(
        state["update"]["model"]["weight"], state_of(step)["update"]["model"]["weight"]
    )


def flip(path: Path, rng: random.Random) -> None:
    """Alter one bit."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> None:
    """Cut off the end, or all of it."""
    os.truncate(path, rng.randrange(path.stat().st_size))


def delete(path: Path, rng: random.Random) -> None:
    """Remove the file."""
    path.unlink()


def swap(path: Path, rng: random.Random) -> None:
    """Exchange the file with another of its folder."""
    other = rng.choice(
        [other for other in sorted(path.parent.iterdir()) if other != path and other.is_file()] or [path]
    )
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def edit(path: Path, rng: random.Random) -> None:
    """Overwrite some bytes, the length unchanged; a digit of a manifest becomes another."""
    content = bytearray(path.read_bytes())
    place = rng.choice([i for i, byte in enumerate(content) if chr(byte) in "0123456789abcdef"] or [0])
    content[place] = ord("0") if content[place] != ord("0") else ord("1")
    path.write_bytes(content)


def grow(path: Path, rng: random.Random) -> None:
    """Add bytes at the end."""
    path.write_bytes(path.read_bytes() + bytes([rng.randrange(256)]) * rng.randrange(1, 9))


DAMAGES: list[Callable[[Path, random.Random], None]] = [flip, truncate, delete, swap, edit, grow]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints to be damaged."""
    folder = tmp_path_factory.mktemp("sound") / "checkpoints"
    saved(folder)
    return folder


@pytest.mark.parametrize("seed", SEEDS)
def test_no_damaged_checkpoint_is_accepted(sound: Path, tmp_path: Path, seed: int):
    """After one or more damages the newest state that loads is a true one, or there is one line that says none is."""
    rng, folder = random.Random(seed), shutil.copytree(sound, tmp_path / "checkpoints")
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        rng.choice(DAMAGES)(rng.choice(sorted(folder.iterdir())), rng)
        if not any(folder.iterdir()):
            break
    checkpoints = Checkpoints(folder, 3)
    try:
        found = checkpoints.newest()
    except DataFault as fault:
        assert "\n" not in str(fault)
    else:
        assert found is None or is_true(found[1])
        assert all("\n" not in line for line in checkpoints.refused)


@pytest.mark.parametrize("damage", [flip, truncate, delete, edit, grow])
@pytest.mark.parametrize("name", ["step_00000012.pt", "step_00000012.pt.json"])
def test_the_one_before_takes_its_place(sound: Path, tmp_path: Path, name: str, damage: Callable):
    """Where the newest checkpoint is damaged the one before it is used."""
    folder = shutil.copytree(sound, tmp_path / "checkpoints")
    damage(folder / name, random.Random(1))
    step, state = Checkpoints(folder, 3).newest()
    assert step == 8 and is_true(state)


def test_the_refused_are_named(sound: Path, tmp_path: Path):
    """Every checkpoint that was passed over is known by its path."""
    folder = shutil.copytree(sound, tmp_path / "checkpoints")
    for step in (8, 12):
        truncate(folder / f"step_{step:08d}.pt", random.Random(step))
    checkpoints = Checkpoints(folder, 3)
    assert checkpoints.newest()[0] == 4
    assert [f"step_{step:08d}.pt" in line for step, line in zip((12, 8), checkpoints.refused, strict=True)] == [
        True
    ] * 2


def test_none_intact_is_a_fault(sound: Path, tmp_path: Path):
    """Where all are damaged nothing is trained anew behind the user's back."""
    folder = shutil.copytree(sound, tmp_path / "checkpoints")
    for path in folder.glob("*.pt"):
        flip(path, random.Random(0))
    with pytest.raises(DataFault, match=f"no checkpoint in {folder} is intact; delete the folder to start anew"):
        Checkpoints(folder, 3).newest()


def test_nothing_saved_is_no_fault(tmp_path: Path):
    """A run that has saved nothing begins at the beginning."""
    assert Checkpoints(tmp_path / "checkpoints", 3).newest() is None


@pytest.mark.parametrize("keep", [1, 2, 3, 7])
def test_the_newest_are_kept(tmp_path: Path, keep: int):
    """Of many saves the newest `keep` are left, each with its manifest."""
    saved(tmp_path / "checkpoints", keep)
    names = [f"step_{step:08d}.pt" for step in STEPS[-keep:]]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == sorted(
        names + [f"{name}.json" for name in names]
    )


def test_behind_a_refused_checkpoint_the_new_ones_stay(tmp_path: Path):
    """Where 12 is damaged training goes on from 8: its next state, 9, takes the place of both."""
    sound = saved(tmp_path / "checkpoints", keep=2)
    flip(tmp_path / "checkpoints" / "step_00000012.pt", random.Random(0))
    assert sound.newest()[0] == 8
    resumed = Checkpoints(tmp_path / "checkpoints", keep=1)
    resumed.save(9, state_of(9))
    resumed.wait()
    assert resumed.steps() == [9] and resumed.newest()[0] == 9


class Killed(BaseException):
    """Stands for a SIGKILL."""


@pytest.mark.parametrize("at", POINTS)
def test_an_interrupted_save_loses_no_other(tmp_path: Path, at: str):
    """Whatever point a save is cut short at, the newest state is true: the old one until the manifest is there."""

    def strike(point: str, step: int) -> None:
        if (point, step) == (at, 12):
            raise Killed

    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, strike)
    for step in STEPS[:2]:
        checkpoints.save(step, state_of(step))
    checkpoints.save(12, state_of(12))
    with pytest.raises(Killed):
        checkpoints.wait()
    step, state = Checkpoints(tmp_path / "checkpoints", 1).newest()
    assert step == (12 if at == "committed" else 8) and is_true(state)


def test_an_interrupted_removal_leaves_none_that_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed between the two files of an old checkpoint, a run has the new one and no manifest of the old."""
    checkpoints, unlink = saved(tmp_path, keep=1), Path.unlink
    left = iter([False, True])

    def strike(path: Path, **how: bool) -> None:
        if path.name.startswith("step_00000012") and next(left):
            raise Killed
        unlink(path, **how)

    monkeypatch.setattr(Path, "unlink", strike)
    checkpoints.save(16, state_of(16))
    with pytest.raises(Killed):
        checkpoints.wait()
    monkeypatch.undo()
    assert Checkpoints(tmp_path, 1).steps() == [16]


def test_clean_up_removes_what_no_manifest_names(tmp_path: Path):
    """Temporary files and states without manifest go, the others stay."""
    checkpoints = saved(tmp_path)
    before = set(tmp_path.iterdir())
    (tmp_path / ".step_00000016.pt.77.tmp").write_bytes(b"half")
    (tmp_path / "step_00000016.pt").write_bytes(b"whole")
    checkpoints.clean()
    assert set(tmp_path.iterdir()) == before


def test_a_finished_run_keeps_none(tmp_path: Path):
    """`remove` leaves no folder behind."""
    checkpoints = saved(tmp_path / "checkpoints")
    (tmp_path / "checkpoints/.step_00000016.pt.77.tmp").write_bytes(b"half")
    checkpoints.remove()
    assert not any(tmp_path.iterdir())


def test_a_failed_save_is_known_and_told(tmp_path: Path):
    """A disk that refuses a save is known before the next one, and told with the file and the remedy."""

    def full(point: str, step: int) -> None:
        if (point, step) == ("write", 8):
            raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(tmp_path, 2, full)
    checkpoints.save(4, state_of(4))
    checkpoints.wait()
    checkpoints.save(8, state_of(8))
    with pytest.raises(StorageFault, match=r"step_00000008.pt: No space left on device; free some space"):
        checkpoints.wait()
    assert checkpoints.steps() == [4] and not list(tmp_path.glob(".*"))


class Evil:
    """An object whose unpickling runs code."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("evil",)


def test_a_checkpoint_with_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A checkpoint that would run code is refused, even with a manifest that fits, and the code does not run."""
    monkeypatch.chdir(tmp_path)
    publish_tensors(tmp_path / "step_00000004.pt", {"state": Evil()})
    with pytest.raises(DataFault, match="does not hold tensors and plain values alone"):
        read_tensors(tmp_path / "step_00000004.pt")
    assert not (tmp_path / "evil").exists()


def test_a_plain_pickle_is_refused(tmp_path: Path):
    """A file that torch did not write is refused in the same way."""
    path = tmp_path / "state.pt"
    publish_tensors(path, {})
    content = pickle.dumps({"step": 3}, protocol=2)
    path.write_bytes(content)
    manifest = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (tmp_path / "state.pt.json").write_text(json.dumps(manifest))
    with pytest.raises(DataFault):
        read_tensors(path)


def _all_latents(folder: Path, key: dict[str, Any]) -> dict[tuple[str, str, int], np.ndarray]:
    cache = LatentCache.open(folder, key)
    places = [
        (name, kind, index)
        for name, entry in cache.datasets.items()
        for kind, array in entry["arrays"].items()
        for index in range(array["shape"][0])
    ]
    return {place: np.array(cache.read(*place)) for place in places}


@pytest.fixture(scope="module")
def caches(encoded: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A cache of float32 and one of rounded, compressed latents."""
    root = shutil.copytree(encoded, tmp_path_factory.mktemp("caches") / "root")
    inputs = [read_json(root / f"receipts/{name}.json") for name in ("datasets", "codec")]
    options = (launched(num_processes=1), root / "01_raw", root)
    return [
        root / encode_latents(*inputs, LatentsConfig(tolerance=each, on_disk=True), *options)["path"]
        for each in (None, {"default": 1e-3})
    ]


@pytest.mark.parametrize("number", [0, 1], ids=["float32", "compressed"])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_damaged_latent_is_accepted(caches: list[Path], tmp_path: Path, seed: int, number: int):
    """After any damage to a shard, verified before or not, all latents are true, or one line names the file."""
    source, rng = caches[number], random.Random(seed)
    key = read_json(source / "manifest.json")["key"]
    folder = shutil.copytree(source, tmp_path / "latents")
    before = _all_latents(source, key)
    if rng.random() < 0.5:
        _all_latents(folder, key)
    shard = rng.choice(sorted(path for path in folder.rglob("c/*/*/0/*") if path.is_file()))
    rng.choice(DAMAGES)(shard, rng)
    try:
        after = _all_latents(folder, key)
    except DataFault as fault:
        assert str(shard) in str(fault) and "\n" not in str(fault)
    else:
        assert all(np.array_equal(after[place], before[place]) for place in before)
