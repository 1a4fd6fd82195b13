"""What identifies a stage, and when its training counts as finished."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.training.jobs import launched, section
from ups.data.latent_cache import LatentCache
from ups.errors import DataFault, OutOfMemory
from ups.files import WEIGHTS, digest_of, manifest_of, read_json, write_json
from ups.runs import launcher, stage_cache
from ups.runs.launcher import is_finished, newest_checkpoint, train_stage
from ups.runs.run import CHECKPOINTS, Run
from ups.training.checkpoints import publish_tensors
from ups.training.stages import STAGES


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("place", ["training.loop", "training.stages.{stage}"])
def test_a_stage_is_identified_by_its_code_and_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, place: str
):
    """Another training loop, or another module of the stage, is another key: old weights are not up to date."""
    keys, changed = [], f"ups.{place.format(stage=stage)}"
    monkeypatch.setattr(launcher, "cached_step", lambda name, folder, key, *_, **__: keys.append(key))
    for version in ("before", "after"):
        monkeypatch.setattr(stage_cache, "code_digest", lambda m, v=version: f"{m} {v}" if m == changed else m)
        train_stage(stage, section(steps=1), {}, launched(), tmp_path)
    assert len(set(keys)) == 2


def test_only_the_weights_of_the_manifest_are_final(tmp_path: Path):
    """Weights without a manifest, altered since it was written or lost are not those of a finished training."""
    weights = tmp_path / WEIGHTS
    weights.write_bytes(b"trained")
    assert not is_finished(tmp_path)
    write_json(manifest_of(weights), {"sha256": digest_of(weights), "bytes": 7})
    assert is_finished(tmp_path)
    weights.write_bytes(b"altered")
    assert not is_finished(tmp_path)
    weights.unlink()
    assert not is_finished(tmp_path)


def test_training_goes_on_at_the_newest_complete_checkpoint(tmp_path: Path):
    """Of steps 4, 8 and 12 the last one was not completed; a folder without checkpoints starts at 0."""
    assert newest_checkpoint(tmp_path) == 0
    (tmp_path / CHECKPOINTS).mkdir()
    for name in ("step_00000004.pt", "step_00000004.pt.json", "step_00000008.pt.json", "step_00000012.pt"):
        (tmp_path / CHECKPOINTS / name).touch()
    assert newest_checkpoint(tmp_path) == 8


def test_micro_batches_are_halved_until_they_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After a lack of memory with 100 tokens, then with 50, a job gets 50, then 25, which later runs remember."""
    limits, tokens = [], iter([100, 50])

    def job(worker: str, run: Run, forward: Callable[[], None]) -> tuple[int, int]:
        limits.append(run.launch.micro_batch_tokens)
        if len(limits) == 3:
            publish_tensors(run.folder / WEIGHTS, {})
        return 1, 0

    def fault(*_: int) -> OutOfMemory:
        found = OutOfMemory("no memory")
        found.tokens = next(tokens)
        return found

    monkeypatch.setattr(launcher, "run_job", job)
    monkeypatch.setattr(launcher, "find_fault", fault)
    monkeypatch.setattr(launcher, "PAUSE_SECONDS", 0.0)
    train_stage("operator", section(), {}, launched(), tmp_path)
    assert limits == [None, 50, 25]
    assert list(read_json(tmp_path / "06_models/tuning.json").values()) == [25]


def test_a_codec_is_trained_on_the_described_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file that was replaced is a fault before a job starts, or at its end; the job knows the stamps of the files."""
    raw, stamps = tmp_path / "01_raw", []
    raw.mkdir()
    (raw / "a.hdf5").write_bytes(b"first")
    inputs = {"datasets": {"sources": {"a.hdf5": {"md5": digest_of(raw / "a.hdf5", "md5")}}}}

    def job(worker: str, run: Run, forward: Callable[[], None]) -> tuple[int, int]:
        stamps.append(run.stamps)
        publish_tensors(run.folder / WEIGHTS, {})
        (raw / "a.hdf5").write_bytes(b"other")
        return 0, 0

    monkeypatch.setattr(launcher, "run_job", job)
    for _ in range(2):
        with pytest.raises(DataFault, match="a.hdf5: has changed since the datasets were described"):
            train_stage("codec", section("codec"), inputs, launched(), tmp_path, raw)
        shutil.rmtree(tmp_path / "06_models")
    assert [list(each) for each in stamps] == [["a.hdf5"]]


def test_latents_that_are_not_on_disk_are_encoded_from_their_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Training reads the raw files then: others of the same names are a fault before a job starts."""
    (tmp_path / "a.hdf5").write_bytes(b"first")
    key = {"source files": {"a.hdf5": digest_of(tmp_path / "a.hdf5", "md5")}}
    cache = SimpleNamespace(on_disk=False, raw=tmp_path)
    monkeypatch.setattr(LatentCache, "open", lambda folder, key: cache)
    monkeypatch.setattr(launcher, "run_job", lambda *_: pytest.fail("a job has started"))
    (tmp_path / "a.hdf5").write_bytes(b"other")
    with pytest.raises(DataFault, match="a.hdf5: has changed since the datasets were described"):
        train_stage("operator", section(), {"latent_cache": {"path": "", "key": key}}, launched(), tmp_path)
