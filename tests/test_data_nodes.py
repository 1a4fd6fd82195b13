"""Nodes of pipeline `data`: what makes their results stale."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.conftest import write_file
from ups.config import NONE_ADDED, WHOLE, SplitConfig, SubsampleConfig
from ups.data.pdebench import FAMILIES
from ups.pipelines.data import describe_datasets, list_folder
from ups.runs.stage_cache import Receipt


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data root with one file of advection."""
    (tmp_path / "01_raw").mkdir()
    write_file(tmp_path / "01_raw", "advection_1d", count=6)
    return tmp_path


def described(root: Path, seed: int = 0, **subsample: dict) -> Receipt:
    """The receipt of the datasets of a data root."""
    config = SplitConfig(seed=seed, valid_fraction=0.3, test_fraction=0.3)
    options = SubsampleConfig(**WHOLE.model_dump(exclude_unset=True) | subsample)
    raw = root / "01_raw"
    return describe_datasets({}, {}, list_folder("folder", raw, root), config, options, NONE_ADDED, raw, root)


def test_datasets_are_described_anew_where_their_family_has_changed(root: Path, monkeypatch: pytest.MonkeyPatch):
    """Another entry in the table makes the description of its datasets stale, that of another family does not."""
    before = described(root)
    monkeypatch.setitem(FAMILIES, "burgers_1d", replace(FAMILIES["burgers_1d"], conserved=()))
    assert described(root) == before
    monkeypatch.setitem(FAMILIES, "advection_1d", replace(FAMILIES["advection_1d"], conserved=()))
    assert described(root)["path"] != before["path"]


def test_datasets_are_described_anew_for_another_split(root: Path):
    """Another seed is another description, the first one is found again."""
    before = described(root)
    assert described(root, seed=1)["path"] != before["path"]
    assert described(root) == before


def test_datasets_are_described_anew_for_other_strides_of_their_family(root: Path):
    """A stride of advection makes the description of its datasets stale, one of another family does not."""
    before = described(root)
    assert described(root, burgers_1d={"every_point": 2}) == before
    after = described(root, advection_1d={"every_point": 2})
    assert after["path"] != before["path"] and after["splits"] == before["splits"]
