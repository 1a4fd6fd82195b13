"""The latent cache is the same for every number of processes, also after one of them was killed."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.training.jobs import launched
from ups.config import LatentsConfig
from ups.data.encoding import Encoding
from ups.data.latent_cache import LatentCache
from ups.data.sources import stamps_of
from ups.errors import DataFault, LostWorker, StorageFault
from ups.files import read_json
from ups.pipelines import training
from ups.pipelines.training import encode_latents
from ups.training import encoding

LATENTS = LatentsConfig(tolerance={"default": 1e-3}, on_disk=True)


def _encode(root: Path, num_processes: int, **launch: int) -> Path:
    """Encode anew; returns the folder of the cache."""
    shutil.rmtree(root / "04_feature/latents", ignore_errors=True)
    inputs = [read_json(root / f"receipts/{name}.json") for name in ("datasets", "codec")]
    launch = launched(num_processes=num_processes, **launch)
    return root / encode_latents(*inputs, LATENTS, launch, root / "01_raw", root)["path"]


def _contents(folder: Path) -> dict[str, bytes]:
    """Shards, statistics and manifest."""
    files = [*folder.rglob("c/*/*/0/0"), *folder.glob("statistics/*"), folder / "manifest.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_raw_files_may_be_moved(root: Path, tmp_path: Path):
    """Latents that are not on disk are then encoded from the new folder; their receipt, on which stages rest, stays."""
    inputs = [read_json(root / f"receipts/{name}.json") for name in ("datasets", "codec")]
    options = LatentsConfig(tolerance=None, on_disk=False), launched(num_processes=1)
    before = encode_latents(*inputs, *options, root / "01_raw", root)
    (tmp_path / "moved").mkdir()
    for file in inputs[0]["sources"]:
        shutil.move(root / "01_raw" / file, tmp_path / "moved" / file)
    with pytest.raises(DataFault, match="is not there any more; put it back, or name its new folder"):
        stamps_of(root / "01_raw", inputs[0]["sources"], root)
    assert encode_latents(*inputs, *options, tmp_path / "moved", root) == before
    assert LatentCache.open(root / before["path"], before["key"]).raw == tmp_path / "moved"


def test_a_cache_belongs_to_the_tolerances_of_its_families(root: Path):
    """Another tolerance of an encoded family makes another cache, that of a family without data does not."""
    inputs = [read_json(root / f"receipts/{name}.json") for name in ("datasets", "codec")]
    tolerances = [{"default": 1e-3}, {"default": 1e-3, "darcy_2d": 1e-2}, {"default": 1e-3, "shallow_water_2d": 1e-2}]
    assert "shallow_water_2d" not in {entry["family"] for entry in inputs[0]["datasets"].values()}
    caches = [
        encode_latents(
            *inputs, LatentsConfig(tolerance=each, on_disk=True), launched(num_processes=1), root / "01_raw", root
        )
        for each in tolerances
    ]
    assert caches[0] == caches[2] and caches[0]["path"] != caches[1]["path"]
    scales = {
        (entry["dataset"]["family"], array["scale"])
        for entry in read_json(root / caches[1]["path"] / "manifest.json")["datasets"].values()
        for array in entry["arrays"].values()
    }
    assert {scale for family, scale in scales if family == "darcy_2d"} == {2.0**-5}
    assert {scale for family, scale in scales if family != "darcy_2d"} == {2.0**-9}


def test_latents_need_room_beside_those_of_former_codecs(root: Path, monkeypatch: pytest.MonkeyPatch):
    """What has been written for another fingerprint is no part of them; what is there already needs no more room."""
    assert _contents(_encode(root, 1))
    monkeypatch.setattr(training, "free_disk_bytes", lambda folder: 0)
    inputs = [read_json(root / f"receipts/{name}.json") for name in ("datasets", "codec")]
    other = LatentsConfig(tolerance={"default": 1e-5}, on_disk=True)
    with pytest.raises(StorageFault, match="latents need .* more, 0 bytes are free; delete older latents"):
        encode_latents(*inputs, other, launched(num_processes=1), root / "01_raw", root)


def test_latents_of_other_files_than_the_described_ones_are_not_made(root: Path, monkeypatch: pytest.MonkeyPatch):
    """A raw file that is replaced before it is opened is a fault, and neither a shard of it nor a manifest is there."""

    def replace_raw(cache: Encoding, tolerances: dict[str, float]) -> None:
        for path in sorted((root / "01_raw").glob("*.h*5")):
            shutil.copy(path, root / "copy")
            (root / "copy").replace(path)

    monkeypatch.setattr(training, "check_room", replace_raw)
    with pytest.raises(DataFault, match="has changed since the datasets were described; run the same command again"):
        _encode(root, 1)
    assert not [path for path in (root / "04_feature/latents").rglob("*/c/*/*/0/0") if path.is_file()]
    assert not list((root / "04_feature/latents").rglob("manifest.json"))
    monkeypatch.undo()
    assert len(_contents(_encode(root, 1))) > 6


def test_a_file_that_changes_after_it_was_opened_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch):
    """The manifest is written only while all raw files are those that were described."""
    share = encoding.encode_share

    def touched(*arguments: Any) -> None:
        share(*arguments)
        next((root / "01_raw").glob("*.h*5")).touch()

    monkeypatch.setattr(encoding, "encode_share", touched)
    with pytest.raises(DataFault, match="has changed since the datasets were described"):
        _encode(root, 1)
    assert not list((root / "04_feature/latents").rglob("manifest.json"))


@pytest.mark.slow
def test_two_processes_write_what_one_writes(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All files of the cache are equal byte for byte, and nothing is left in the system's temporary folder."""
    one = _contents(_encode(root, 1))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    assert _contents(_encode(root, 2)) == one and len(one) > 6
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.slow
def test_a_process_waits_for_a_slower_one(root: Path, monkeypatch: pytest.MonkeyPatch):
    """Shares that differ by more than the time without progress after which a job counts as hung are no fault."""
    (root / "slow.py").write_text(
        "import time\nfrom ups.training import encoding\nfrom ups.training.process import run_rank\n"
        "share = encoding.encode_share\n"
        "def slow(encoding, encode, run, ranks, advance):\n"
        "    for _ in range(30 * ranks.rank):\n        time.sleep(0.3)\n        advance(0)\n"
        "    share(encoding, encode, run, ranks, advance)\n"
        "encoding.encode_share = slow\nrun_rank(encoding.encode_on_rank)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{root}:{Path(encoding.__file__).parents[2]}")
    monkeypatch.setattr(encoding, "MODULE", "slow")
    assert len(_contents(_encode(root, 2, timeout_seconds=5))) > 6


@pytest.mark.slow
def test_a_killed_process_is_one_line_and_the_next_command_goes_on(root: Path, monkeypatch: pytest.MonkeyPatch):
    """After a rank was killed the whole shards stay, and the same command completes the cache."""
    expected = _contents(_encode(root, 1))
    folder = root / "04_feature/latents"
    killer = root / "killer.py"
    killer.write_text(
        "import os, signal\nfrom ups.training import encoding\nfrom ups.data.encoding import Encoding\n"
        "from ups.training.process import run_rank\n"
        "write = Encoding.write_share\n"
        "def killed(self, raw, encode, advance, **share):\n"
        "    write(self, raw, encode, lambda _: os.kill(os.getpid(), signal.SIGKILL), **share)\n"
        "Encoding.write_share = killed\nrun_rank(encoding.encode_on_rank)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{root}:{Path(encoding.__file__).parents[2]}")
    monkeypatch.setattr(encoding, "MODULE", "killer")
    with pytest.raises(LostWorker, match="killed"):
        _encode(root, 2)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("c/*/*/0/0")}
    monkeypatch.undo()
    inputs = [read_json(root / f"receipts/{name}.json") for name in ("datasets", "codec")]
    receipt = encode_latents(*inputs, LATENTS, launched(num_processes=2), root / "01_raw", root)
    assert 1 <= len(before) < 4 and all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert _contents(root / receipt["path"]) == expected
