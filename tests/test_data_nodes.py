"""Nodes of pipeline `data`: what makes their results stale."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest

from tests.data.conftest import write_file
from ups.config import NONE_ADDED, WHOLE, SplitConfig, SubsampleConfig
from ups.data import sources
from ups.data.inspection import inspect
from ups.data.pdebench import FAMILIES
from ups.data.sources import ChecksumCache, stamps_of
from ups.errors import DataFault
from ups.pipelines import data, on_raw_files
from ups.pipelines.data import describe_datasets, fit_normalization, list_folder
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


def replace_raw(root: Path) -> None:
    """Put another file of the same size and structure in place of the raw file, as another run would."""
    (path,) = (root / "01_raw").glob("*.hdf5")
    (root / "other").mkdir()
    other = write_file(root / "other", "advection_1d", count=6)
    with h5py.File(other, "r+") as file:
        file["tensor"][...] = file["tensor"][...] + 1.0
    other.replace(path)


def test_a_file_that_was_replaced_since_it_was_described_is_refused(root: Path):
    """Statistics are taken of the described files alone, found by sums that are taken once for each stamp."""
    receipt = described(root)
    replace_raw(root)
    with pytest.raises(DataFault, match=r"hdf5: has changed since the datasets were described; run the same command"):
        fit_normalization(receipt, root / "01_raw", root)
    (name,) = receipt["sources"]
    assert ChecksumCache(root / "01_raw/checksums.json").find(root / "01_raw" / name) is None
    again = described(root)
    assert again["path"] != receipt["path"] and fit_normalization(again, root / "01_raw", root)["statistics"]


def test_models_are_scored_on_the_files_of_their_latents(root: Path):
    """Other files of the same names may have states of training in place of those of the test split."""
    sources = {name: entry["md5"] for name, entry in described(root)["sources"].items()}
    latents = {"key": {"source files": sources | {"../supplement/a.hdf5": "of training alone"}}}
    work = on_raw_files(lambda folder: {"scored": True}, latents, root / "01_raw", root)
    assert work(root) == {"scored": True}
    replace_raw(root)
    with pytest.raises(DataFault, match=r"hdf5: has changed since .*; if it does not help, delete it"):
        work(root)


@pytest.mark.parametrize("step", ["describe", "fit"])
def test_nothing_is_kept_of_a_file_that_was_replaced_meanwhile(root: Path, monkeypatch: pytest.MonkeyPatch, step: str):
    """Datasets and statistics of other files than those whose sums were taken are no receipt."""

    def replaced_meanwhile(task: str, *arguments: Any, **request: Any) -> Any:
        if task == step:
            replace_raw(root)
        return inspect(task, *arguments, **request)

    monkeypatch.setattr(data, "inspect", replaced_meanwhile)
    with pytest.raises(DataFault, match="has changed since the datasets were described"):
        fit_normalization(described(root), root / "01_raw", root)
    assert {"describe": 0, "fit": 1}[step] == len(list(root.glob("04_feature/*/*/receipt.json")))


def test_known_files_are_not_read_again(root: Path, monkeypatch: pytest.MonkeyPatch):
    """A file with the stamp that it had when its sum was taken is the described one, whatever its size."""
    receipt = described(root)
    monkeypatch.setattr(sources, "digest_of", lambda path, algorithm: pytest.fail("read again"))
    assert fit_normalization(receipt, root / "01_raw", root)["statistics"]


def test_sums_beside_downloaded_files_are_known(root: Path, monkeypatch: pytest.MonkeyPatch):
    """Files fetched into another folder have their sums there; a file of this name that is no such list is ignored."""
    receipt = described(root)
    (root / "01_raw").rename(root / "raw")
    with monkeypatch.context() as context:
        context.setattr(sources, "digest_of", lambda path, algorithm: pytest.fail("read again"))
        assert stamps_of(root / "raw", receipt["sources"], root).keys() == receipt["sources"].keys()
    (root / "raw/checksums.json").write_text("another program's")
    assert stamps_of(root / "raw", receipt["sources"], root).keys() == receipt["sources"].keys()
