"""Entries of the catalog: whole or absent on disk, and previews of the types that Kedro-Viz knows."""

import base64
import inspect
import io
import json
import re
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from kedro.config import OmegaConfigLoader
from kedro.io import CatalogConfigResolver, DatasetError
from kedro.pipeline import Pipeline

from ups.datasets import JSON, LatentCacheReceipt, Markdown, Pages, Records, Text
from ups.pipeline_registry import register_pipelines
from ups.settings import CONFIG_LOADER_ARGS

CONF = Path(__file__).parents[1] / "conf"
LAYERS = ["raw", "feature", "codec", "latents", "models", "model_output", "reporting"]


def png(seed: int, height: int = 20) -> bytes:
    """A small picture of noise."""
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, np.random.default_rng(seed).random((height, 30, 3)), format="png")
    return buffer.getvalue()


def preview_type(dataset: object) -> str:
    """The type by which Kedro-Viz chooses how to show a preview."""
    return inspect.signature(dataset.preview).return_annotation.__name__


def test_previews_have_their_types(tmp_path: Path):
    """Records and the cache show tables, receipts JSON, cards and texts HTML."""
    path = str(tmp_path / "x")
    assert preview_type(Records(filepath=path)) == "TablePreview"
    assert preview_type(LatentCacheReceipt(filepath=path, data_root=str(tmp_path))) == "TablePreview"
    assert preview_type(JSON(filepath=path)) == "JSONPreview"
    assert preview_type(Pages(path)) == preview_type(Markdown(filepath=path)) == "HTMLPreview"


@pytest.fixture(scope="module")
def catalog() -> dict[str, Any]:
    """The entries of the catalog."""
    return OmegaConfigLoader(str(CONF), env="base", **CONFIG_LOADER_ARGS)["catalog"]


def test_layers_are_in_order(catalog: dict[str, Any]):
    """Every entry has a layer, and the file lists the layers in the order of the data flow."""
    layers = [entry["metadata"]["kedro-viz"]["layer"] for entry in catalog.values()]
    assert list(dict.fromkeys(layers)) == LAYERS
    assert layers == sorted(layers, key=LAYERS.index)


def test_no_step_leads_back_to_an_earlier_layer(catalog: dict[str, Any]):
    """Neither a node nor a part of `full`, one box in Kedro-Viz: where there is a cycle, that draws no layers."""
    resolver = CatalogConfigResolver(catalog, default_runtime_patterns={"{default}": {"type": "MemoryDataset"}})

    def layers(names: set[str]) -> list[int]:
        found = (resolver.resolve_pattern(name).get("metadata") for name in names if not name.startswith("params:"))
        return [LAYERS.index(entry["kedro-viz"]["layer"]) for entry in found if entry]

    for name, pipeline in register_pipelines().items():
        steps = [(node.name, set(node.inputs), set(node.outputs)) for node in pipeline.nodes]
        for box in {node.namespace for node in pipeline.nodes} - {None}:
            part = Pipeline([node for node in pipeline.nodes if node.namespace == box])
            used = set().union(*(node.inputs for node in pipeline.nodes if node.namespace != box))
            steps.append((box, part.inputs(), part.outputs() | (part.all_outputs() & used)))
        for step, inputs, outputs in steps:
            assert max(layers(inputs), default=0) <= min(layers(outputs), default=9), (name, step)


def test_what_nodes_load_is_whole_or_absent(catalog: dict[str, Any]):
    """An entry that a node loads is a dataset of ours: those of kedro-datasets may leave half a file after a kill."""
    loaded = set().union(*(node.inputs for pipeline in register_pipelines().values() for node in pipeline.nodes))
    in_place = {name for name, entry in catalog.items() if not entry["type"].startswith("ups.")}
    assert in_place and not in_place & loaded


def test_long_lists_are_cut_to_valid_json(tmp_path: Path):
    """A receipt with ten thousand numbers is previewed as JSON that says how many are left out."""
    dataset = JSON(filepath=str(tmp_path / "x.json"))
    dataset.save({"splits": {"train": list(range(10_000))}, "files": {"a": [1, 2]}})
    shown = json.loads(dataset.preview())
    assert shown["files"] == {"a": [1, 2]}
    assert shown["splits"]["train"] == [*range(20), "... and 9980 more"]
    assert len(dataset.load()["splits"]["train"]) == 10_000


def test_optional_files_may_be_missing(tmp_path: Path):
    """An optional file that is not there is nothing; any other is a fault that names it."""
    path = str(tmp_path / "x.json")
    assert JSON(filepath=path, optional=True).load() is None and Text(filepath=path, optional=True).load() is None
    with pytest.raises(DatasetError, match=re.escape(path)):
        JSON(filepath=path).load()
    JSON(filepath=path).save({"a": 1})
    assert JSON(filepath=path, optional=True).load() == {"a": 1}


def test_no_records_leave_an_optional_file_as_it_was(tmp_path: Path):
    """An empty list makes no optional file and replaces none; any other file it does."""
    optional, always = (Records(filepath=str(tmp_path / "x.json"), optional=value) for value in (True, False))
    optional.save([])
    assert not optional.exists() and optional.preview()["data"] == []
    optional.save([{"value": 1}])
    optional.save([])
    assert optional.load() == [{"value": 1}]
    always.save([])
    assert optional.load() == []


def test_nothing_leaves_optional_reports_as_they_were(tmp_path: Path):
    """No text, no page and no verdict replace none that an earlier run has written."""
    text = Markdown(filepath=str(tmp_path / "x.md"), optional=True)
    pages, verdict = Pages(str(tmp_path / "x"), optional=True), JSON(filepath=str(tmp_path / "x.json"), optional=True)
    for dataset, content, nothing in ((text, "a", ""), (pages, {"a.png": b"a"}, {}), (verdict, {"passed": True}, {})):
        dataset.save(nothing)
        assert not dataset.exists()
        dataset.save(content)
        dataset.save(nothing)
        assert dataset.load() == content


def test_records_are_shown_as_a_table(tmp_path: Path):
    """The preview has a row per record and a column per name, with short numbers and without lists."""
    dataset = Records(filepath=str(tmp_path / "x.json"))
    dataset.save(
        [{"method": "operator", "value": 1 / 3, "trajectories": [1, 2]}, {"method": "codec", "mode": {"a": 1}}]
    )
    assert dataset.preview() == {
        "index": [0, 1],
        "columns": ["method", "value", "mode"],
        "data": [["operator", 0.3333, ""], ["codec", "", '{"a": 1}']],
    }


def test_texts_are_shown_as_html(tmp_path: Path):
    """The preview of a text has its tables, shows HTML in it as text, and no two underscores make emphasis."""
    dataset = Markdown(filepath=str(tmp_path / "x.md"))
    dataset.save("| a | b |\n|---|---|\n| 1 | <b>2_3_4</b> |\n")
    assert "<td>1</td>" in dataset.preview() and "&lt;b&gt;2_\u20283_" in dataset.preview()


def test_cache_shows_its_arrays(tmp_path: Path):
    """The preview of the latent cache has one row per dataset and kind, with shape and size."""
    arrays = {
        "fields": {"shape": [4, 5, 64, 8], "scale": None},
        "coefficients": {"shape": [4, 1, 64, 8], "scale": 0.5},
    }
    for kind, num_bytes in (("fields", 2**20), ("coefficients", 2**19)):
        (tmp_path / "latents/abc/darcy.zarr" / kind).mkdir(parents=True)
        (tmp_path / "latents/abc/darcy.zarr" / kind / "0").write_bytes(bytes(num_bytes))
    manifest = {"key": {}, "datasets": {"darcy": {"arrays": arrays}}}
    (tmp_path / "latents" / "abc" / "manifest.json").write_text(json.dumps(manifest))
    dataset = LatentCacheReceipt(filepath=str(tmp_path / "latent_cache.json"), data_root=str(tmp_path))
    dataset.save({"path": "latents/abc"})
    table = dataset.preview()
    assert table["columns"][:4] == ["dataset", "kind", "trajectories", "snapshots"]
    assert table["data"] == [
        ["darcy", "fields", 4, 5, 64, 8, 1.0],
        ["darcy", "coefficients", 4, 1, 64, 8, 0.5],
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


def test_a_page_that_has_changed_is_written_again(tmp_path: Path):
    """A page saved under the name of an older one takes its place."""
    dataset = Pages(str(tmp_path))
    dataset.save({"a.png": png(0)})
    dataset.save({"a.png": png(1)})
    assert dataset.load() == {"a.png": png(1)} != {"a.png": png(0)}


@pytest.mark.parametrize("dataset", [Markdown, JSON])
def test_a_failed_save_keeps_the_old_file(tmp_path: Path, dataset: type):
    """What cannot be written leaves the file that was there."""
    entry = dataset(filepath=str(tmp_path / "x"))
    entry.save("old")
    with pytest.raises(DatasetError):
        entry.save("\ud800" if dataset is Markdown else float("nan"))
    assert entry.load() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
