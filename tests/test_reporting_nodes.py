"""Figures and report are made once, and again when something that they show has changed."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import pytest

from tests.evaluation.test_report import DATASETS, STATISTIC
from tests.training.jobs import launched
from ups.config import ReportConfig
from ups.evaluation import figures
from ups.evaluation import report as pages
from ups.files import write_json
from ups.pipelines import STAGES, reporting
from ups.runs.run import append_metrics

ROLLOUTS = {"path": "07_model_output/evaluate/a", "fingerprint": "a", "datasets": {"1D_Burgers": "burgers_1d"}}
DESCRIBED = {
    "datasets": {"1D_Burgers": asdict(DATASETS["1D_Burgers"])},
    "splits": {"1D_Burgers": {"train": [0], "valid": [], "test": [1]}},
    "sources": {"a.h5": {"bytes": 1, "md5": "", "family": "burgers_1d"}},
}
INPUTS = dict.fromkeys(STAGES, {"path": "06_models/x"}) | {
    "metrics": [{"value": float("inf")}],  # of an untrained model
    "verdict": {},
    "corrector_report": {},
    "rollouts": ROLLOUTS,
    "datasets": DESCRIBED,
    "normalization": {"statistics": {"burgers_1d": {"fields": {"u": STATISTIC}, "coefficients": {}}}},
    "baseline_metrics": None,
    "baseline_rollouts": None,
    "costs": None,
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was drawn or written, one entry each time."""
    calls: list[str] = []
    monkeypatch.setattr(figures, "draw_figures", lambda *_: calls.append("figures") or {"errors.png": b"page"})
    monkeypatch.setattr(pages, "render", lambda *_: calls.append("report") or f"page {len(calls)}")
    monkeypatch.setattr(reporting.Run, "read", lambda _: SimpleNamespace(inputs={}))
    return calls


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., str]:
    """The node, in a data root with an empty raw file; arguments replace its inputs."""
    (tmp_path / "01_raw").mkdir()
    h5py.File(tmp_path / "01_raw/a.h5", "w").close()

    def write(compare: tuple[str, ...] = (), **changes: Any) -> str:
        config, launch = ReportConfig(compare=list(compare)), launched(num_processes=1)
        return reporting.report(config, "simulate", 0, launch, tmp_path / "01_raw", tmp_path, **INPUTS | changes)

    return write


def test_figures_of_other_predictions_are_drawn(made: list[str], tmp_path: Path):
    """The same predictions are drawn once, whatever the folder that the data root has been moved to."""
    root, moved = tmp_path / "root", tmp_path / "moved"
    assert [reporting.plot(ROLLOUTS, root) for _ in range(2)] == [{"errors.png": b"page"}] * 2
    root.rename(moved)
    reporting.plot(ROLLOUTS, moved)
    assert made == ["figures"]
    reporting.plot(ROLLOUTS | {"fingerprint": "b"}, moved)
    assert made == ["figures", "figures"]


def test_a_page_is_written_once(made: list[str], report: Callable[..., str]):
    """The second call returns the page of the first, in spite of a later date and another load of the machine."""
    assert [report(), report()] == ["page 1", "page 1"]


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": [{"value": 0.1}]},
        {"verdict": {"passed": True}},
        {"corrector_report": {"burgers_1d": {}}},
        {"costs": {"methods": {}}},
        {"rollouts": ROLLOUTS | {"fingerprint": "b"}},
        {"operator": {"path": "06_models/y"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_page_of_other_results_is_written(made: list[str], report: Callable[..., str], changes: dict[str, Any]):
    """Each result that the page shows counts."""
    assert [report(), report(**changes), report()] == ["page 1", "page 2", "page 1"]


def test_a_page_follows_the_time_of_training(made: list[str], report: Callable[..., str], tmp_path: Path):
    """A stage that was trained again has the same receipt and another time, which the page shows."""
    report()
    (tmp_path / "06_models/x").mkdir(parents=True)
    append_metrics(tmp_path / "06_models/x", 10, {"steps_per_second": 5.0, "cpu_cores": 1.0})
    assert report() == "page 2"


def test_a_page_follows_its_template_and_its_machine(
    made: list[str], report: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    """Another template or another commit of the source gives another page."""
    report()
    monkeypatch.setattr(reporting, "TEMPLATES", ("report.css",))
    assert report() == "page 2"
    monkeypatch.setattr(reporting, "describe_machine", lambda *_: {"git": "another", "date": "", "load": 0.0})
    assert report() == "page 3"


def test_a_page_follows_the_runs_beside_it(made: list[str], report: Callable[..., str], tmp_path: Path):
    """New scores of a run in `report.compare` give another page."""
    for value in (0.1, 0.2):
        write_json(tmp_path / "other/08_reporting/metrics.json", [{"value": value}])
        report(compare=(str(tmp_path / "other"),))
    assert made == ["report", "report"]
