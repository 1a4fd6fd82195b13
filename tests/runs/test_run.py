"""Files of a run folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contents import expect_one_line
from tests.data.own import KDV
from tests.training.jobs import launched
from ups.data.families import Families
from ups.errors import DataFault
from ups.runs.run import Run


def written(folder: Path) -> Run:
    """The description of a run, as it was written into its folder."""
    folder.mkdir(parents=True)
    run = Run(folder, "codec", "0" * 64, {"steps": 3}, {"datasets": {}}, launched(), "cpu", folder.parents[2])
    run.write()
    return run


def test_a_run_is_read_as_it_was_written(tmp_path: Path):
    """What `run.json` describes is the same after its data root was moved, but for its place."""
    written(tmp_path / "a/06_models/codec/0")
    (tmp_path / "a").rename(tmp_path / "b")
    folder = tmp_path / "b/06_models/codec/0"
    assert Run.read(folder) == Run(
        folder, "codec", "0" * 64, {"steps": 3}, {"datasets": {}}, launched(), "cpu", tmp_path / "b"
    )


def test_a_run_keeps_the_definitions_of_its_command(families: Families, tmp_path: Path):
    """Families that are not PDEBench's are read as they were when the run was made, with texts and units."""
    families.define(defined := replace(KDV, units={"u": "m"}, meanings={"u": "elevation"}))
    run = written(tmp_path / "06_models/codec/0")
    families.define(replace(KDV, conserved=()))
    assert Run.read(run.folder).families == [defined]


def test_a_wrong_description_is_one_line(tmp_path: Path):
    """Whatever stands in `run.json`, its reader says what is wrong in one line."""
    folder = written(tmp_path / "06_models/codec/0").folder
    fields = ("stage", "fingerprint", "config", "inputs", "launch", "device", "data_root")
    expect_one_line(folder / "run.json", lambda: Run.read(folder), fields)


def test_a_run_of_another_version_is_not_called_damaged(tmp_path: Path):
    """A launch option that this version has, and the run lacks, is no damage that deleting the file would repair."""
    folder = written(tmp_path / "06_models/codec/0").folder
    content = json.loads((folder / "run.json").read_text())
    del content["launch"]["nccl"]
    (folder / "run.json").write_text(json.dumps(content))
    with pytest.raises(DataFault, match="another version of ups: train its stage again"):
        Run.read(folder)
