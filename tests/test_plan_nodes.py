"""Pipeline `plan` and the check of sizes: what is shown, what stops a run, and what is not read."""

import json
from pathlib import Path

import numpy as np
import pytest
from kedro.framework.project import pipelines
from kedro.framework.startup import bootstrap_project
from rich.console import Console

from tests.data.conftest import write_file
from tests.test_parameters import typed
from tests.training.jobs import launched, section
from tests.untrained import make_root_of, receipt
from ups.config import WHOLE, LatentsConfig, SubsampleConfig
from ups.data import estimate
from ups.data.estimate import bytes_per_value
from ups.errors import StorageFault
from ups.files import write_json
from ups.pipelines import plan
from ups.pipelines.plan import check_sizes, find_sizes, seconds_per_step, show_plan
from ups.runs.run import METRICS, RUN
from ups.runs.stage_cache import Receipt

PROJECT = Path(__file__).parents[1]
LATENTS = LatentsConfig(tolerance=None, on_disk=True)
LAUNCH = launched(num_processes=1)


def sizes_in(raw: Path, subsample: SubsampleConfig = WHOLE, source: str = "folder") -> Receipt:
    """The planned sizes of a folder of files, or of the base configuration."""
    parameters = typed()
    options = (parameters.simulate, parameters.download, subsample, parameters.codec, LATENTS)
    return find_sizes(source, *options, raw)


def shown(sizes: Receipt, root: Path, monkeypatch: pytest.MonkeyPatch, raw: Path = Path()) -> tuple[Receipt, str]:
    """The plan, and what a terminal of 80 columns shows of it."""
    console = Console(width=80, record=True, force_terminal=False)
    monkeypatch.setattr(plan, "get_console", lambda: console)
    p = typed()
    stages = (p.codec, p.operator, p.steady, p.diffusion, p.consistency)
    return show_plan(sizes, *stages, LAUNCH, raw, root), console.export_text()


def test_no_value_is_read(tmp_path: Path):
    """A file whose values would be refused is planned: only its shapes, times and coordinates are read."""
    spoilt = np.full((4, 5, 8), np.nan, "f4")
    path = write_file(tmp_path, "advection_1d", edit=lambda file: file["tensor"].write_direct(spoilt))
    (size,) = sizes_in(tmp_path)["sizes"]
    assert (size["name"], size["num_trajectories"], size["num_snapshots"], size["grid"]) == (path.stem, 4, 5, (8,))


def test_strides_are_planned(tmp_path: Path):
    """The plan has the points, snapshots and trajectories that `subsample` leaves."""
    write_file(tmp_path, "advection_1d")
    part = {"every_point": 2, "every_snapshot": 2, "first_trajectories": 3}
    (size,) = sizes_in(tmp_path, SubsampleConfig(default=WHOLE.default, advection_1d=part))["sizes"]
    assert (size["num_trajectories"], size["num_snapshots"], size["grid"]) == (3, 3, (4,))


def test_plan_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The plan of the base configuration, nothing of which exists yet, has a row per dataset, whole name, and stage."""
    sizes = sizes_in(tmp_path / "01_raw", source="simulate")
    result, text = shown(sizes, tmp_path, monkeypatch)
    assert len(sizes["sizes"]) == 11 and all(size["missing_bytes"] > 0 for size in sizes["sizes"])
    assert all(len(line) <= 80 for line in text.splitlines()) and "128 x 21" in text and "16x16x16" in text
    assert all(size["name"] in text for size in sizes["sizes"])
    assert list(result["stages"]) == ["codec", "operator", "steady", "diffusion", "consistency"]
    assert text.count("not known") == 10 and not (tmp_path / "01_raw").exists()


def test_stages_without_datasets_are_not_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Steady data alone need no operator."""
    write_file(tmp_path, "darcy_2d")
    result, _ = shown(sizes_in(tmp_path), tmp_path, monkeypatch)
    assert list(result["stages"]) == ["codec", "steady", "diffusion", "consistency"]


def test_steps_of_correctors_are_an_upper_bound():
    """Steps and times of diffusion and consistency are told as "up to", because the split may leave families out."""
    console = Console(width=80, record=True, force_terminal=False)
    rows = {stage: {"steps": 1200, "seconds_per_step": 0.05} for stage in ("operator", "diffusion", "consistency")}
    console.print(plan._table_of_stages(rows))
    cells = [
        line.split() for line in console.export_text().splitlines() if line.split()[:1] and line.split()[0] in rows
    ]
    assert cells[0] == ["operator", "1,200", "0.05", "60", "s"]
    assert cells[1:] == [[s, "up", "to", "1,200", "0.05", "up", "to", "60", "s"] for s in ("diffusion", "consistency")]


def test_time_of_a_step_is_that_of_a_run_with_the_same_options(tmp_path: Path):
    """Ten steps at 5 and ten at 2 per second are 0.35 s per step, for any number of steps; other options have none."""
    folder = tmp_path / "operator" / "0"
    (folder / "x").mkdir(parents=True)
    launch = {"num_processes": 1}
    write_json(folder / RUN, {"device": "cpu", "launch": launch, "config": section().model_dump(mode="json")})
    rates = [{"step": 10, "steps_per_second": 5.0}, {"step": 20, "steps_per_second": 2.0}, {"step": 20, "loss": 1.0}]
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in rates))
    found = [
        seconds_per_step(folder.parent, section(steps=9, **more), LAUNCH, "cpu") for more in ({}, {"clip_norm": 2.0})
    ]
    assert found == [pytest.approx(0.35), None]
    assert seconds_per_step(folder.parent, section(), launched(num_processes=2), "cpu") is None


def test_a_full_disk_stops_the_run_unless_latents_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Datasets whose latents do not fit are refused; a finished latent cache needs no room."""
    root = make_root_of(tmp_path, ("advection_1d",), count=5)
    monkeypatch.setattr(estimate, "free_disk_bytes", lambda folder: 0)
    latents = LatentsConfig(tolerance=None, on_disk=True)
    given = (receipt(root, "datasets"), section("codec"), latents, LAUNCH, root / "01_raw")
    (size,) = check_sizes(*given, root)["sizes"]
    assert size["num_trajectories"] == 5
    with pytest.raises(StorageFault, match=f"^{tmp_path / 'other'}: the latent cache need"):
        check_sizes(*given, tmp_path / "other")


def test_latents_are_estimated_by_the_tolerance_of_their_family(tmp_path: Path):
    """Only a family with a tolerance needs fewer bytes than float32; without latents on disk none needs any."""
    root = make_root_of(tmp_path, ("advection_1d", "darcy_2d"), count=5)

    def sizes(tolerance: dict[str, float | None] | None, *, on_disk: bool = True) -> dict[str, int]:
        given = (receipt(root, "datasets"), section("codec"), LatentsConfig(tolerance=tolerance, on_disk=on_disk))
        return {size["family"]: size["latent_bytes"] for size in check_sizes(*given, LAUNCH, root, root)["sizes"]}

    float32, rounded = sizes(None), sizes({"default": None, "darcy_2d": 0.01})
    assert rounded["advection_1d"] == float32["advection_1d"]
    assert rounded["darcy_2d"] == pytest.approx(float32["darcy_2d"] * bytes_per_value(0.01) / 4, abs=1)
    assert set(sizes({"default": 0.01}, on_disk=False).values()) == {0}


def test_raw_files_elsewhere_need_no_room_in_the_data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Files still to come count where they lie below the data root, but not in a folder that may be another disk."""
    sizes = sizes_in(tmp_path / "01_raw", source="simulate")
    monkeypatch.setattr(estimate, "free_disk_bytes", lambda folder: sum(s["latent_bytes"] for s in sizes["sizes"]))
    shown(sizes, tmp_path / "root", monkeypatch, raw=tmp_path / "01_raw")
    with pytest.raises(StorageFault, match="of raw files need"):
        shown(sizes, tmp_path, monkeypatch, raw=tmp_path / "01_raw")


def test_sizes_are_checked_before_anything_slow():
    """`full` and `data` refuse what cannot fit before they read all values and before they train."""
    bootstrap_project(PROJECT)
    for name, later in (
        ("full", ["fit_normalization", "train_codec", "encode_latents"]),
        ("data", ["fit_normalization"]),
    ):
        order = [node.name for node in pipelines[name].nodes]
        assert order.index("check_sizes") < min(map(order.index, later))
