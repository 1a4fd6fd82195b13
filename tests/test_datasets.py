"""Entries of the catalog: whole or absent on disk, and previews of the types that Kedro-Viz knows."""

import base64
import inspect
import io
import json
import re
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from kedro.config import OmegaConfigLoader
from kedro.io import DatasetError

from ups.datasets import JSON, Directory, LatentCacheReceipt, Markdown, Pages
from ups.settings import CONFIG_LOADER_ARGS

CONF = Path(__file__).parents[1] / "conf"


def png(seed: int, height: int = 20) -> bytes:
    """A small picture of noise."""
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, np.random.default_rng(seed).random((height, 30, 3)), format="png")
    return buffer.getvalue()


def preview_type(dataset: object) -> str:
    """The type by which Kedro-Viz chooses how to show a preview."""
    return inspect.signature(dataset.preview).return_annotation.__name__


def test_previews_have_their_types(tmp_path: Path):
    """Folders and the cache show tables, receipts JSON, cards HTML."""
    path = str(tmp_path / "x")
    assert preview_type(Directory(path)) == "TablePreview"
    assert preview_type(LatentCacheReceipt(path, str(tmp_path))) == "TablePreview"
    assert preview_type(JSON(path)) == "JSONPreview"
    assert preview_type(Pages(path)) == "HTMLPreview"


@pytest.mark.parametrize(("params", "folder"), [({}, "by_variable"), ({"raw_root": "by_params"}, "by_params")])
def test_sample_environment_reads_the_folder_it_is_told(
    params: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
):
    """`--env sample` reads raw files from UPS_SAMPLE_DATA, and rather from `--params raw_root`."""
    monkeypatch.setenv("UPS_SAMPLE_DATA", "by_variable")
    loader = OmegaConfigLoader(str(CONF), env="sample", runtime_params=params, **CONFIG_LOADER_ARGS)
    raw = loader["catalog"]["raw"]
    assert (raw["filepath"], raw["create"]) == (folder, False)


def test_every_entry_of_the_catalog_is_ours_or_previews():
    """The catalog has the cards, and the folders whose listing would say nothing have no preview."""
    catalog = OmegaConfigLoader(str(CONF), env="base", **CONFIG_LOADER_ARGS)["catalog"]
    assert catalog["data_cards"]["type"] == "ups.datasets.Pages"
    assert catalog["latent_cache"]["type"] == "ups.datasets.LatentCacheReceipt"
    assert catalog["data_root"]["metadata"]["kedro-viz"]["preview"] is False


def test_folder_lists_its_files(tmp_path: Path):
    """The preview of a folder has the visible files in order with their sizes in MiB, none if it is not there."""
    (tmp_path / "b.h5").write_bytes(bytes(3 * 2**20))
    (tmp_path / "a.h5").write_bytes(bytes(2**19))
    (tmp_path / ".c.partial").touch()
    (tmp_path / "sub").mkdir()
    table = Directory(str(tmp_path)).preview()
    assert table == {"index": [0, 1], "columns": ["file", "MiB"], "data": [["a.h5", 0.5], ["b.h5", 3.0]]}
    assert Directory(str(tmp_path / "none"), create=False).preview()["data"] == []


def test_long_lists_are_cut_to_valid_json(tmp_path: Path):
    """A receipt with ten thousand numbers is previewed as JSON that says how many are left out."""
    dataset = JSON(str(tmp_path / "x.json"))
    dataset.save({"splits": {"train": list(range(10_000))}, "files": {"a": [1, 2]}})
    shown = json.loads(dataset.preview())
    assert shown["files"] == {"a": [1, 2]}
    assert shown["splits"]["train"] == [*range(20), "... and 9980 more"]
    assert len(dataset.load()["splits"]["train"]) == 10_000


def test_optional_files_may_be_missing(tmp_path: Path):
    """An optional file that is not there is nothing; any other is a fault that names it."""
    path = str(tmp_path / "x.json")
    assert JSON(path, optional=True).load() is None
    with pytest.raises(DatasetError, match=re.escape(path)):
        JSON(path).load()
    JSON(path).save({"a": 1})
    assert JSON(path, optional=True).load() == {"a": 1}


def test_cache_shows_its_arrays(tmp_path: Path):
    """The preview of the latent cache has one row per dataset and kind, with shape, size and dtype."""
    arrays = {
        "fields": {"shape": [4, 5, 64, 8], "dtype": "float16"},
        "coefficients": {"shape": [4, 1, 64, 8], "dtype": "float32"},
    }
    (tmp_path / "latents" / "abc").mkdir(parents=True)
    manifest = {"key": {}, "datasets": {"darcy": {"arrays": arrays}}}
    (tmp_path / "latents" / "abc" / "manifest.json").write_text(json.dumps(manifest))
    dataset = LatentCacheReceipt(str(tmp_path / "latent_cache.json"), str(tmp_path))
    dataset.save({"path": "latents/abc"})
    table = dataset.preview()
    assert table["columns"][:4] == ["dataset", "kind", "trajectories", "snapshots"]
    assert table["data"] == [
        ["darcy", "fields", 4, 5, 64, 8, 0.02, "float16"],
        ["darcy", "coefficients", 4, 1, 64, 8, 0.008, "float32"],
    ]


def test_pages_show_themselves(tmp_path: Path):
    """The preview has every page as a picture of its own size, the first dozen if there are more."""
    dataset = Pages(str(tmp_path / "cards"))
    dataset.save({f"{number:02d}.png": png(number, 20 + number) for number in range(14)})
    pictures = re.findall(r'<img width="100%" src="data:image/png;base64,([^"]+)">', dataset.preview())
    heights = [matplotlib.image.imread(io.BytesIO(base64.b64decode(picture))).shape[0] for picture in pictures]
    assert heights == [20 + number for number in range(12)]


def test_saved_pages_replace_all_others(tmp_path: Path):
    """Pages of datasets that are gone vanish, unchanged ones are not written again, nothing temporary stays."""
    dataset = Pages(str(tmp_path))
    dataset.save({"a.png": png(0), "b.png": png(1)})
    before = (tmp_path / "a.png").stat().st_ino
    dataset.save({"a.png": png(0), "c.png": png(2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "c.png"]
    assert (tmp_path / "a.png").stat().st_ino == before
    assert dataset.load() == {"a.png": png(0), "c.png": png(2)}


@pytest.mark.parametrize("dataset", [Markdown, JSON])
def test_a_failed_save_keeps_the_old_file(tmp_path: Path, dataset: type):
    """What cannot be written leaves the file that was there."""
    entry = dataset(str(tmp_path / "x"))
    entry.save("old")
    with pytest.raises(DatasetError):
        entry.save("\ud800" if dataset is Markdown else float("nan"))
    assert entry.load() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
