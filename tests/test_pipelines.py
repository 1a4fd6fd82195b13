import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import h5py
import numpy as np
import pytest
import yaml
from kedro.framework.project import pipelines
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project
from kedro.pipeline import Pipeline

from tests.training.jobs import adapt_section, processes_of, wait_until
from ups.config import WHOLE
from ups.data.families import Families, Family
from ups.data.simulate import simulate
from ups.errors import ConfigFault
from ups.metrics.bootstrap import MIN_TRAJECTORIES
from ups.pipelines import baselines
from ups.pipelines.adaptation import describe_few
from ups.training.stages import STAGES as STAGE_TABLE

PROJECT = Path(__file__).parents[1]
SECONDS_PER_RUN = 300
SECONDS_TO_VANISH = 10
STAGES = {"codec", "operator", "diffusion", "consistency", "steady"}
STEPS = STAGES | {
    "describe_datasets",
    "fit_normalization",
    "draw_cards",
    "encode_latents",
    "evaluate_few",
    "measure_coverage",
    "choose_corrector",
    "evaluate",
    "plot",
    "report",
}
PDEBENCH = {"nRMSE", "RMSE", "max_error", "cRMSE", "bRMSE", "fRMSE_low", "fRMSE_mid", "fRMSE_high"}
METRICS = PDEBENCH | {f"pdebench_compat/{name}" for name in PDEBENCH - {"fRMSE_high"}} | {"MAE", "L2RE", "VRMSE"}
TRANSIENT = {"persistence", "codec", "operator", "diffusion", "consistency"}
STEADY = {"codec", "steady", "diffusion", "consistency"}
METHODS = {"advection_1d": TRANSIENT, "diffusion_reaction_2d": TRANSIENT, "darcy_2d": STEADY}
HORIZONS = {"one_step", "rollout"}
TRIVIAL = {"persistence", "codec"}
ROLLOUTS = {(family, method, "rollout") for family in METHODS for method in METHODS[family] if family != "darcy_2d"}
ENSEMBLES = {(family, m, horizon) for family in METHODS for m in ("diffusion", "consistency") for horizon in HORIZONS}
FULL = ("--pipeline", "full", "--env", "smoke")
SAMPLE = ("--pipeline", "full", "--env", "sample")

Completed = subprocess.CompletedProcess[str]


def _start(data_root: Path, *options: str, params: str = "", **environment: str) -> subprocess.Popen[str]:
    """`kedro run` with these options, writing below `data_root`."""
    command = [sys.executable, "-m", "kedro", "run", *options, "--params"]
    command.append(",".join(filter(None, [f"data_root={data_root}", params])))
    foreign = ("MLFLOW_TRACKING_URI", "UPS_TRACKING_RUN", "UPS_SAMPLE_DATA")
    inherited = {name: value for name, value in os.environ.items() if name not in foreign}
    return subprocess.Popen(
        command,
        cwd=PROJECT,
        env=inherited | {"DO_NOT_TRACK": "true", "COLUMNS": "500"} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _finish(process: subprocess.Popen[str]) -> Completed:
    """Wait for the end, but not for ever."""
    try:
        output, errors = process.communicate(timeout=SECONDS_PER_RUN)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def _kedro_run(data_root: Path, *options: str, params: str = "", **environment: str) -> Completed:
    return _finish(_start(data_root, *options, params=params, **environment))


def _steps(completed: Completed) -> dict[str, str]:
    """Step -> `running` or `up to date`, as the log says."""
    return dict(re.findall(r"(\w+): (running|up to date) \(\w{12}\)", completed.stdout))


def _ran(completed: Completed) -> set[str]:
    return {step for step, what in _steps(completed).items() if what == "running"}


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _runs(data_root: Path) -> list[Any]:
    """All MLflow runs of a data root, the oldest first."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{data_root}/mlflow.db")
    experiment = client.get_experiment_by_name("ups")
    return client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])


def _parents(runs: list[Any]) -> list[Any]:
    return [run for run in runs if "mlflow.parentRunId" not in run.data.tags]


def _children(runs: list[Any], parent: Any) -> dict[str, Any]:
    found = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    return {run.info.run_name: run for run in found}


def _is_training(data_root: Path) -> bool:
    """Whether there is a worker, and not only torchrun, of which a new child has the command line at first."""
    return any("torch.distributed.run" not in process.info["cmdline"] for process in processes_of(data_root))


def _stop_during_training(data_root: Path, number: signal.Signals, *options: str, params: str) -> Completed:
    """Send `kedro run` a signal as soon as a worker is there."""
    process = _start(data_root, *options, params=params)
    try:
        assert wait_until(lambda: process.poll() is not None or _is_training(data_root), SECONDS_PER_RUN)
        assert process.poll() is None, process.communicate()
        process.send_signal(number)
    finally:
        completed = _finish(process)
    return completed


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Completed]:
    """A data root in which the whole pipeline has run once, and how that went."""
    data_root = tmp_path_factory.mktemp("smoke") / "data root"
    return data_root, _kedro_run(data_root, *FULL)


@pytest.fixture(scope="session")
def again(first: tuple[Path, Completed]) -> tuple[Path, Completed]:
    """The same data root after the same command a second time, with nodes in threads, and how that went."""
    return first[0], _kedro_run(first[0], *FULL, "--runner", "ThreadRunner")


@pytest.fixture
def data_root(again: tuple[Path, Completed], tmp_path: Path) -> Path:
    """A copy of the finished data root for the test to change."""
    return shutil.copytree(again[0], tmp_path / "copy")


@pytest.fixture(scope="session")
def interrupted(
    again: tuple[Path, Completed], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Completed, Completed]:
    """A copy in which a longer training of the operator was stopped by Ctrl-C, then finished by the same command."""
    data_root = shutil.copytree(again[0], tmp_path_factory.mktemp("interrupted") / "copy")
    stopped = _stop_during_training(data_root, signal.SIGINT, *FULL, params="operator.steps=9")
    return data_root, stopped, _kedro_run(data_root, *FULL, params="operator.steps=9")


def test_the_whole_pipeline_runs(first: tuple[Path, Completed]):
    """`kedro run --pipeline full --env smoke` does every step, exits with 0 and has no complaint."""
    _, completed = first
    assert completed.returncode == 0, completed.stderr
    assert _ran(completed) == STEPS
    assert completed.stderr == ""


def test_the_second_run_does_nothing(again: tuple[Path, Completed]):
    """The same command again says of every step that it is up to date, although nodes run in threads now."""
    _, completed = again
    assert completed.returncode == 0, completed.stderr
    assert _steps(completed) == dict.fromkeys(STEPS, "up to date")


def test_metrics_are_complete(first: tuple[Path, Completed]):
    """There is one finite record for each metric wherever it applies."""
    records = _json(first[0] / "08_reporting/metrics.json")
    found = [(record["family"], record["method"], record["horizon"], record["metric"]) for record in records]
    keys = {metric: {key[:3] for key in found if key[3] == metric} for metric in {key[3] for key in found}}
    everywhere = {(family, method, horizon) for family in METHODS for method in METHODS[family] for horizon in HORIZONS}
    assert {metric for metric in keys if keys[metric] == everywhere} >= METRICS
    assert keys["correlation_time"] == ROLLOUTS
    assert keys["conservation_drift"] == {key for key in ROLLOUTS if key[0] == "advection_1d"}
    assert keys["limited_steps"] == keys["limited_values"] == {k for k in everywhere if k[1] not in TRIVIAL}
    assert keys["CRPS"] == keys["spread_skill"] == keys["rank_deviation"] == keys["ECE"] == ENSEMBLES
    assert len(found) == len(set(found))
    known = [record for record in records if record["metric"] != "nRMSE_without_limits"]  # of untrained models
    assert all(math.isfinite(record["value"]) and record["num_trajectories"] > 0 for record in known)


def test_correctors_say_how_they_draw(first: tuple[Path, Completed]):
    """Records of the correctors, and no others, have the mode that was decided on from the scores of all candidates."""
    records, decided = _json(first[0] / "08_reporting/metrics.json"), _json(first[0] / "06_models/corrector.json")
    found = {(r["family"], r["method"]): r.get("mode") for r in records}
    assert {key for key, mode in found.items() if mode} == {(family, method) for family, method, _ in ENSEMBLES}
    assert all(decided["families"][family][method]["mode"] == found[family, method] for family, method, _ in ENSEMBLES)
    report = _json(first[0] / "08_reporting/corrector.json")
    assert set(report) == set(METHODS)
    assert all(
        {"num_trajectories", "decision", "plain", "candidates", "accept"} == set(of_family)
        for of_family in report.values()
    )


def test_errors_have_a_confidence_interval(first: tuple[Path, Completed]):
    """The nRMSE is the mean over trajectories, and between the ends of its interval where these are enough."""
    records = [r for r in _json(first[0] / "08_reporting/metrics.json") if r["metric"] == "nRMSE"]
    assert all(("low" in record) == (record["num_trajectories"] >= MIN_TRAJECTORIES) for record in records)
    assert all(record["low"] <= record["value"] <= record["high"] for record in records if "low" in record)
    assert all(record["value"] == pytest.approx(fmean(record["trajectories"]), rel=1e-4) for record in records)


def test_verdict_has_every_gate(first: tuple[Path, Completed]):
    """The verdict grades each dataset and names each gate on it, with value, limit and outcome; so did the first."""
    verdict = _json(first[0] / "08_reporting/verdict.json")
    assert verdict["passed"] is True
    assert {(gate["name"], gate["family"]) for gate in verdict["gates"]} == {
        ("operator_finite", "advection_1d"),
        ("operator_finite", "diffusion_reaction_2d"),
        ("steady_finite", "darcy_2d"),
    }
    keys = {"name", "dataset", "family", "value", "limit", "passed", "comparison"}
    assert all(set(gate) == keys for gate in verdict["gates"])
    graded = {entry["family"]: entry["grade"] for entry in verdict["grades"].values()}
    assert graded == dict.fromkeys(METHODS, "good")
    first_verdict = _json(first[0] / "08_reporting/first_verdict.json")
    assert set(first_verdict["grades"]) == set(verdict["grades"]) and first_verdict["passed"]


def test_figures_are_drawn(first: tuple[Path, Completed]):
    """Errors, spectra and the snapshots of every dataset are PNG files, and nothing else is there."""
    folder = first[0] / "08_reporting"
    names = {path.name for path in (folder / "figures").iterdir()}
    assert {"errors.png", "spectra.png"} < names and len(names) == 5
    assert all((folder / "figures" / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_the_report_is_the_last_line(first: tuple[Path, Completed]):
    """The last line in the terminal is the place of the page, which has a section for every dataset."""
    data_root, completed = first
    page = data_root / "08_reporting/report.html"
    assert completed.stdout.rstrip().split("\n")[-1].endswith(f" MB: {page}")
    datasets = _json(data_root / "04_feature/datasets.json")["datasets"]
    assert all(f'<section id="{name}"' in page.read_text(encoding="utf-8") for name in datasets)


def test_tracking_has_one_run_with_a_run_per_stage(first: tuple[Path, Completed], again: tuple[Path, Completed]):
    """The first command is a finished MLflow run with one for each stage, the second one without any."""
    runs = _runs(again[0])
    training, idle = _parents(runs)
    assert set(_children(runs, training)) == STAGES
    assert not _children(runs, idle)
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert (training.data.tags["pipeline"], training.data.tags["env"]) == ("full", "smoke")


def test_the_tracked_run_has_its_result(first: tuple[Path, Completed], again: tuple[Path, Completed]):
    """The run of a command has test scores, grades, verdict, reports, data parameters, commit and machine."""
    from mlflow import MlflowClient

    records = _json(first[0] / "08_reporting/metrics.json")
    run = _parents(_runs(again[0]))[0]
    tracked = {key: value for key, value in run.data.metrics.items() if key.count("/") > 1}
    assert tracked == {
        f"test/{r['dataset']}/{r['method']}/{r['horizon']}/nRMSE": pytest.approx(r["value"])
        for r in records
        if r["metric"] == "nRMSE"
    }
    assert run.data.metrics["test/datasets_good"] == 3 and run.data.metrics["test/rollout_nRMSE"] > 0
    assert (run.data.tags["verdict"], run.data.tags["grade.2D_diff-react_NA_NA"]) == ("passed", "good")
    assert {"machine", "mlflow.source.git.commit"} <= set(run.data.tags)
    assert (run.data.params["source"], run.data.params["split.test_fraction"]) == ("simulate", "0.1")
    reports = MlflowClient(f"sqlite:///{again[0]}/mlflow.db").list_artifacts(run.info.run_id, "08_reporting")
    assert {"metrics.json", "verdict.json", "figures"} <= {Path(report.path).name for report in reports}


def test_tracked_stages_have_parameters_and_curves(again: tuple[Path, Completed]):
    """The run of a stage holds its section, its fingerprint and its curves of loss and validation loss."""
    runs = _runs(again[0])
    for stage, run in _children(runs, _parents(runs)[0]).items():
        receipt = _json(again[0] / f"06_models/{stage}.json")
        assert run.data.params[f"{stage}.steps"] == "8"
        assert run.data.tags["fingerprint"] == receipt["fingerprint"]
        assert {f"{stage}/loss", f"{stage}/valid_loss"} <= set(run.data.metrics)


def test_a_changed_section_trains_its_stage_and_those_after_it(interrupted: tuple[Path, Completed, Completed]):
    """Other steps for the operator train it and what is built on it, not the codec, its latents or the steady model."""
    _, _, resumed = interrupted
    assert resumed.returncode == 0, resumed.stderr
    after = {"diffusion", "consistency", "measure_coverage", "choose_corrector", "evaluate_few", "evaluate"}
    assert _ran(resumed) == {"operator", "plot", "report"} | after
    assert set(_steps(resumed)) == STEPS


def test_ctrl_c_ends_everything(interrupted: tuple[Path, Completed, Completed]):
    """After Ctrl-C during training the exit code is 75, the runs are KILLED and no process is left."""
    data_root, stopped, _ = interrupted
    runs = _runs(data_root)
    parent = _parents(runs)[2]
    assert stopped.returncode == 75
    assert stopped.stderr.startswith("FAULT 75 preempted: operator was interrupted")
    assert parent.info.status == "KILLED"
    assert {name: run.info.status for name, run in _children(runs, parent).items()} == {"operator": "KILLED"}
    assert wait_until(lambda: not processes_of(data_root), SECONDS_TO_VANISH)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_killed_run_is_finished_by_the_same_command(data_root: Path, number: signal.Signals):
    """After `kill` during training no process is left, the same command finishes, and the stale runs are KILLED."""
    command: dict[str, Any] = {"params": "steady.steps=9"}
    options = ("--nodes", "train_steady", "--env", "smoke")
    stopped = _stop_during_training(data_root, number, *options, **command)
    assert stopped.returncode not in (0, None)
    assert wait_until(lambda: not processes_of(data_root), SECONDS_TO_VANISH)
    finished = _kedro_run(data_root, *options, **command)
    assert finished.returncode == 0, finished.stderr
    assert _ran(finished) == {"steady"}
    runs = _runs(data_root)
    *_, stale, last = _parents(runs)
    assert (stale.info.status, last.info.status) == ("KILLED", "FINISHED")
    assert {run.info.status for run in _children(runs, stale).values()} == {"KILLED"}


def test_force_trains_again(data_root: Path):
    """`launch.force=true` trains a finished stage again, and its receipt stays the same."""
    before = _json(data_root / "06_models/steady.json")
    completed = _kedro_run(data_root, "--nodes", "train_steady", "--env", "smoke", params="launch.force=true")
    assert completed.returncode == 0, completed.stderr
    assert _steps(completed) == {"steady": "running"}
    assert _json(data_root / "06_models/steady.json") == before


def test_a_failed_gate_fails_the_run_last(data_root: Path, tmp_path: Path):
    """A gate that is not met ends with exit code 7, after metrics, figures and verdict are written."""
    conf, report = shutil.copytree(PROJECT / "conf", tmp_path / "conf"), data_root / "08_reporting"
    path = conf / "smoke/parameters.yml"
    parameters = yaml.safe_load(path.read_text())
    parameters["judge"]["gates"][0]["at_most"] = 1e-9
    path.write_text(yaml.safe_dump(parameters))
    shutil.rmtree(report)
    completed = _kedro_run(data_root, *FULL, "--conf-source", str(conf))
    assert completed.returncode == 7
    failed = "1D_Advection_Sols_beta0.4: operator_finite: rollout nRMSE of operator: "
    assert completed.stderr.startswith(f"FAULT 7 gate: datasets: 1 good, 2 unusable; {failed}")
    assert completed.stderr.count("\n") == 1
    assert _json(report / "verdict.json")["passed"] is False
    assert completed.stderr.rstrip().endswith(f"see verdict.json and {report / 'report.html'}")
    assert {path.name for path in report.iterdir()} >= {"metrics.json", "verdict.json", "figures", "report.html"}
    assert "failed with error" not in completed.stdout
    last = _parents(_runs(data_root))[-1]
    assert (last.info.status, last.data.tags["verdict"]) == ("FAILED", "failed")


@pytest.mark.parametrize(
    ("params", "culprit"),
    [
        ("operator.stepps=3", "unknown parameter operator.stepps, did you mean steps?"),
        ("oprator.steps=3", "unknown parameter oprator, did you mean operator?"),
        ("operator.steps=many", "parameter operator.steps = 'many'"),
        ("operator.learning_rate=-1", "parameter operator.learning_rate = -1"),
        ("source=pdebench,download.families=[advektion_1d]", "advektion_1d"),
        ("evaluation.folder=nowhere", "evaluation.folder = nowhere: there is no such folder; name one"),
    ],
    ids=["misspelt parameter", "misspelt section", "wrong type", "wrong value", "unknown family", "missing folder"],
)
def test_a_wrong_parameter_stops_before_any_work(tmp_path: Path, params: str, culprit: str):
    """A wrong parameter ends with exit code 2 and one line that names it; no run is opened, nothing is written."""
    completed = _kedro_run(tmp_path / "root", *FULL, params=params)
    assert completed.returncode == 2
    assert completed.stderr.startswith("FAULT 2 config: ") and culprit in completed.stderr
    assert completed.stderr.count("\n") == 1 and "Traceback" not in completed.stdout
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    "store", [{}, {"MLFLOW_TRACKING_URI": "sqlite:///{}/mlflow.db"}], ids=["embedded", "own store"]
)
def test_a_place_that_cannot_be_written_to_is_told(tmp_path: Path, store: dict[str, str]):
    """A data root below a file ends with exit code 6 and one line that names it."""
    (tmp_path / "file").touch()
    own = {name: uri.format(tmp_path) for name, uri in store.items()}
    completed = _kedro_run(tmp_path / "file/root", "--nodes", "list_folder", **own)
    assert completed.returncode == 6
    assert completed.stderr.startswith(f"FAULT 6 storage: {tmp_path / 'file/root'}: Not a directory; ")
    assert completed.stderr.count("\n") == 1 and "Traceback" not in completed.stdout


def test_torchrun_is_refused(tmp_path: Path):
    """`kedro run` below torchrun, where every rank would orchestrate, ends with exit code 2 and the remedy."""
    completed = _kedro_run(tmp_path / "root", *FULL, RANK="0", WORLD_SIZE="2")
    assert completed.returncode == 2
    assert re.fullmatch(r"FAULT 2 config: started under torchrun .*launch.num_processes=N.*\n", completed.stderr)
    assert not (tmp_path / "root").exists()


def test_the_models_of_a_run_are_registered(data_root: Path):
    """`--pipeline register` makes them the champion, which a process in any folder loads by its name."""
    completed = _kedro_run(data_root, "--pipeline", "register", "--env", "smoke")
    assert completed.returncode == 0, completed.stderr
    found = _json(data_root / "08_reporting/registration.json")
    assert (found["version"], found["champion"], found["reason"]) == ("1", "1", "it is the first")
    script = "import ups; print(*ups.load('models:/ups@champion').families)"
    environment = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{data_root}/mlflow.db"}
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    assert set(output.stdout.split()) == set(METHODS)


def _advection(folder: Path, beta: float = 0.4, resolution: int = 8) -> Path:
    path = folder / f"1D_Advection_Sols_beta{beta}.hdf5"
    sizes = {"num_trajectories": 4, "resolution": resolution, "num_snapshots": 3, "duration": 0.1, "seed": 0}
    simulate(path, family="advection_1d", parameters={"beta": beta}, **sizes)
    return path


def _no_folder(folder: Path) -> None:
    folder.rmdir()


def _no_file(folder: Path) -> None:
    (folder / "notes.txt").write_text("no data here")


def _corrupt_file(folder: Path) -> None:
    path = _advection(folder)
    path.write_bytes(path.read_bytes()[:1000])


def _file_with_nan(folder: Path) -> None:
    with h5py.File(_advection(folder), "r+") as file:
        file["tensor"][2, 1, 0] = math.nan


def test_a_hopeless_run_stops_before_its_correctors(data_root: Path, tmp_path: Path):
    """Where no dataset is usable after a few trajectories the command ends with 7 before it trains a corrector."""
    conf = shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    path = conf / "smoke/parameters.yml"
    path.write_text(path.read_text().replace("at_most: 1.0e+6", "at_most: 1.0e-9"))
    completed = _kedro_run(data_root, "--pipeline", "training", "--env", "smoke", "--conf-source", str(conf))
    assert completed.returncode == 7
    assert completed.stderr.startswith("FAULT 7 gate: stopped after a few trajectories: ")
    assert completed.stderr.endswith("see first_verdict.json\n")
    assert _ran(completed) == set() and "steady" in _steps(completed) and "diffusion" not in _steps(completed)


def test_a_folder_is_scored_and_nothing_else_done(data_root: Path, tmp_path: Path):
    """`evaluation.folder` gives scores, verdict, figures and report of all trajectories there and changes no others."""
    (tmp_path / "files").mkdir()
    _advection(tmp_path / "files", beta=0.7, resolution=64)
    before = (data_root / "08_reporting/metrics.json").read_bytes()
    params = f"evaluation.folder={tmp_path / 'files'}"
    completed = _kedro_run(data_root, "--pipeline", "evaluation", "--env", "smoke", params=params)
    assert completed.returncode == 0, completed.stderr
    assert _steps(completed) == {
        "measure_coverage": "up to date",
        "choose_corrector": "up to date",
        "evaluate": "up to date",
        "plot": "up to date",
        "report": "up to date",
        "evaluate_external": "running",
        "plot_external": "running",
        "report_external": "running",
    }
    records = _json(data_root / "08_reporting/external/metrics.json")
    assert {(r["dataset"], r["num_trajectories"]) for r in records} == {("1D_Advection_Sols_beta0.7", 4)}
    assert {record["method"] for record in records} == {"persistence", "codec", "operator"}
    verdict = _json(data_root / "08_reporting/external/verdict.json")
    assert set(verdict["grades"]) == {"1D_Advection_Sols_beta0.7"} and verdict["passed"]
    assert "1D_Advection_Sols_beta0.7: good" in completed.stdout and "beta0.4" not in completed.stdout
    assert "| 1D_Advection_Sols_beta0.7 |" in (data_root / "08_reporting/external/table.md").read_text()
    assert (data_root / "08_reporting/external/figures/errors.png").is_file()
    page = data_root / "08_reporting/external/report.html"
    assert "Advection 1D, β = 0.7" in page.read_text() and "".join(completed.stdout.split()).endswith(str(page))
    assert (data_root / "08_reporting/metrics.json").read_bytes() == before


def test_models_learn_from_a_folder(data_root: Path, tmp_path: Path):
    """`--pipeline adapt` trains and scores networks of the files alone; a second run has nothing to do."""
    (tmp_path / "files").mkdir()
    path, sizes = (
        tmp_path / "files/1D_Advection_Sols_beta1.0.hdf5",
        {"num_trajectories": 4, "resolution": 32, "seed": 1},
    )
    simulate(path, family="advection_1d", parameters={"beta": 1.0}, num_snapshots=4, duration=0.3, **sizes)
    before = _json(data_root / "06_models/operator.json")
    arguments = ("--pipeline", "adapt", "--env", "smoke")
    completed = _kedro_run(data_root, *arguments, params=f"adapt.folder={tmp_path / 'files'}")
    assert completed.returncode == 0, completed.stderr
    steps = {"describe_few", "adapted_2", "scratch_2", "fno_2", "score_adapted"}
    assert _steps(completed) == dict.fromkeys(steps, "running")
    records = _json(data_root / "08_reporting/adapt/metrics.json")
    assert {record["method"] for record in records} == {"before", "persistence", "adapted", "scratch", "fno"}
    assert {path.name for path in (data_root / "08_reporting/adapt").iterdir()} >= {"adapt.md", "learning_curves.png"}
    assert _json(data_root / "06_models/operator.json") == before
    again = _kedro_run(data_root, *arguments, params=f"adapt.folder={tmp_path / 'files'}")
    assert _steps(again) == dict.fromkeys(steps, "up to date")


def test_adapting_needs_a_folder(tmp_path: Path):
    """Without `adapt.folder` there is one line with the remedy, exit code 2 and no result."""
    with pytest.raises(ConfigFault) as caught:
        describe_few(adapt_section(), WHOLE, tmp_path)
    assert caught.value.exit_code == 2
    line = r"FAULT 2 config: adapt.folder is not set: .* --params adapt.folder=DIR"
    assert re.fullmatch(line, caught.value.line)
    assert not list(tmp_path.iterdir())


def test_validation_does_not_change_what_adaptations_are_scored_on(families: Families, tmp_path: Path):
    """Its trajectories are among those to learn from, so that any share of them leaves the test split as it is."""
    (tmp_path / "files").mkdir()
    u = np.random.default_rng(0).normal(size=(24, 4, 8))
    np.savez(tmp_path / "files/wave_1d_0.npz", u=u, dx=0.125, dt=0.1)
    families.define(Family("wave_1d", "u_t = u_x", ("u",), ("x",), "periodic", ()))
    held_out = []
    for fraction in (0.1, 0.5, 0.9):
        section = adapt_section(folder=str(tmp_path / "files"), valid_fraction=fraction, test_fraction=0.5)
        (split,) = describe_few(section, WHOLE, tmp_path)["splits"].values()
        held_out.append(split["test"])
    assert held_out[0] == held_out[1] == held_out[2] and len(held_out[0]) == 12


def test_a_corrected_definition_is_another_adaptation(families: Families, tmp_path: Path):
    """Boundary and symmetries follow from it: what was found with the former one is not "up to date"."""
    (tmp_path / "files").mkdir()
    u = np.random.default_rng(0).normal(size=(8, 4, 8))
    np.savez(tmp_path / "files/wave_1d_0.npz", u=u, dx=0.125, dt=0.1)
    found = []
    for boundary in ("periodic", "outflow", "outflow"):
        families.define(Family("wave_1d", "u_t = u_x", ("u",), ("x",), boundary, ()))
        described = describe_few(adapt_section(folder=str(tmp_path / "files")), WHOLE, tmp_path)
        (dataset,) = described["datasets"].values()
        found.append((dataset["boundary"][0], described["fingerprint"]))
    assert [boundary for boundary, _ in found] == ["periodic", "outflow", "outflow"]
    assert found[0] != found[1] == found[2]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One MLflow store for several data roots: making a new one takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.mark.parametrize(
    ("prepare", "culprit"),
    [
        pytest.param(_no_folder, "raw: no such folder", marks=pytest.mark.slow),
        pytest.param(_no_file, "raw: holds no file *.hdf5", marks=pytest.mark.slow),
        pytest.param(_corrupt_file, "1D_Advection_Sols_beta0.4.hdf5: cannot be opened", marks=pytest.mark.slow),
        (_file_with_nan, "1D_Advection_Sols_beta0.4.hdf5: field 'u' of trajectory 2, snapshot 1, is NaN"),
    ],
)
def test_bad_raw_data_stops_before_training(tmp_path: Path, store: str, prepare: Callable[[Path], None], culprit: str):
    """A folder or file that cannot be used ends with exit code 3 and one line that names it; nothing is trained."""
    (tmp_path / "raw").mkdir()
    prepare(tmp_path / "raw")
    params = f"raw_root={tmp_path / 'raw'}"
    completed = _kedro_run(tmp_path / "root", *SAMPLE, params=params, MLFLOW_TRACKING_URI=store)
    assert completed.returncode == 3
    assert completed.stderr.startswith("FAULT 3 data: ") and culprit in completed.stderr
    assert completed.stderr.count("\n") == 1
    assert not (tmp_path / "root/06_models").exists()


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["ThreadRunner", "ParallelRunner"])
def test_other_runners_train(again: tuple[Path, Completed], tmp_path: Path, runner: str):
    """Nodes in threads or processes train the same models, each stage tracked below the run of the command."""
    completed = _kedro_run(tmp_path, *FULL, "--runner", runner)
    assert completed.returncode == 0, completed.stderr
    assert _ran(completed) == STEPS
    for stage in STAGES:
        assert _json(tmp_path / f"06_models/{stage}.json") == _json(again[0] / f"06_models/{stage}.json")
    runs = _runs(tmp_path)
    assert set(_children(runs, _parents(runs)[0])) == STAGES


def test_the_report_with_baselines_has_a_verdict_on_them():
    """The gates against FNO and U-Net are checked before the report is written again."""
    nodes = {node.name: node for node in baselines.create_pipeline().nodes}
    judge, report = nodes["judge_with_baselines"], nodes["report_with_baselines"]
    assert "baseline_metrics" in judge.inputs and set(judge.outputs) <= set(report.inputs)


@pytest.mark.slow
def test_baselines_are_compared(again: tuple[Path, Completed]):
    """Every family has its models, as long as budget and pace allow; the table has all; a rerun does nothing."""
    data_root = again[0]
    completed = _kedro_run(data_root, "--pipeline", "baselines", "--env", "smoke")
    assert completed.returncode == 0, completed.stderr
    pace, budget = (
        _json(data_root / "06_models/pace.json")["seconds_per_step"],
        _json(data_root / "06_models/budget.json"),
    )
    shares = {"linear": 0.1} | dict.fromkeys(("fno", "unet", "transformer", "normalized_fno", "normalized_unet"), 1.0)
    for kind, share in shares.items():
        for family, receipt in _json(data_root / f"06_models/{kind}.json").items():
            allowed = share * budget[family] / pace[f"{kind}/{family}"]
            assert _json(data_root / receipt["path"] / "run.json")["config"]["steps"] == max(1, round(allowed))
    records = _json(data_root / "08_reporting/baseline_metrics.json")
    found = {(record["family"], record["method"], record["horizon"]) for record in records}
    families = ("advection_1d", "diffusion_reaction_2d", "darcy_2d")
    steady = {("darcy_2d", kind, h) for kind in shares for h in ("one_step", "rollout") if "normalized" in kind}
    assert {(f, m, h) for f in families for m in shares for h in ("one_step", "rollout")} - steady == found
    errors, costs = (data_root / "08_reporting/table.md").read_text().split("## Cost")
    assert errors.count("| 2D_DarcyFlow_beta1.0_Train |") == 2 and re.search(r"^\| operator +\|", costs, re.MULTILINE)
    assert all(
        cost["training_seconds"] > 0 for cost in _json(data_root / "08_reporting/costs.json")["methods"].values()
    )
    assert _ran(_kedro_run(data_root, "--pipeline", "baselines", "--env", "smoke")) == set()


@pytest.mark.slow
def test_selection_runs_and_is_off_without_proof(again: tuple[Path, Completed]):
    """One validation trajectory proves nothing: every curve is there, selection is off, and the test split unseen."""
    data_root = again[0]
    completed = _kedro_run(data_root, "--pipeline", "selection", "--env", "smoke")
    assert completed.returncode == 0, completed.stderr
    found = _json(data_root / "08_reporting/selection.json")
    transient = {"advection_1d", "diffusion_reaction_2d"}
    assert {family: decision["is_on"] for family, decision in found["families"].items()} == dict.fromkeys(
        transient, False
    )
    ways = {(r["family"], r["method"], r["num_members"]) for r in found["records"]}
    assert {(family, way, 2) for family in transient for way in ("mean", "best", "weighted", "oracle", "beam")} <= ways
    assert {record["split"] for record in found["records"]} == {"valid"}
    assert all(math.isfinite(record["nRMSE"]) and record["seconds"] > 0 for record in found["records"])
    assert (data_root / "08_reporting/selection/selection.png").stat().st_size > 0
    assert all(family in (data_root / "08_reporting/selection.md").read_text() for family in transient)
    assert _ran(_kedro_run(data_root, "--pipeline", "selection", "--env", "smoke")) == set()
    evaluated = _kedro_run(data_root, "--from-nodes", "evaluate", "--env", "smoke")
    assert evaluated.returncode == 0 and "selection.json is of other" not in evaluated.stderr + evaluated.stdout


def test_shifts_are_scored(data_root: Path):
    """`--pipeline coverage` warns of no trajectory without shift, and has a row for every family."""
    before = _json(data_root / "06_models/coverage.json")
    completed = _kedro_run(data_root, "--pipeline", "coverage", "--env", "smoke")
    assert completed.returncode == 0, completed.stderr
    assert _steps(completed) == {"score_shifts": "running"}
    found = _json(data_root / "08_reporting/shifts.json")
    groups = [row["group"] for row in found["summary"]]
    assert set(groups) == {*METHODS, "all", "all, parameters and amplitudes alone"}
    assert all(f"| {group} " in (data_root / "08_reporting/shifts.md").read_text() for group in groups)
    warned = [warned for record in found["records"] if record["kind"] == "none" for warned in record["warned"]]
    assert warned and not any(warned)
    assert _json(data_root / "06_models/coverage.json") == before


def test_commands_start_without_heavy_packages():
    """`kedro` lists pipelines and checks parameters before it imports what only some nodes need."""
    script = "import sys, ups.settings, ups.pipeline_registry as p; p.register_pipelines(); print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    heavy = {"torch", "scipy", "mlflow", "zarr", "matplotlib", "google_crc32c", "neuralop"}
    assert heavy & set(output.stdout.split()) == set()


def test_registered_pipelines():
    """The registry has the whole house under two names, its three rooms, and fifteen pipelines run by name alone."""
    bootstrap_project(PROJECT)
    tools = {"plan", "baselines", "ablation", "adapt", "tune", "profile", "benchmark", "selection", "seeds"}
    tools |= {"coverage", "compression", "predict", "protocol", "register", "leaderboard"}
    assert set(pipelines) == {"__default__", "full", "data", "training", "evaluation"} | tools
    nodes = {name: {node.name for node in pipelines[name].nodes} for name in pipelines}
    assert nodes["__default__"] == nodes["full"]
    assert all(nodes[name] and not nodes[name] & nodes["full"] for name in tools)


def test_a_node_has_its_name_within_its_part():
    """Kedro-Viz folds `full` into its three parts and shows these alone unfolded; `kedro run` needs no part's name."""
    bootstrap_project(PROJECT)
    full, parts = pipelines["full"], ("data", "training", "evaluation")
    assert {node.namespace for node in full.nodes} == set(parts)
    following = {node.name for node in (Pipeline([]) + full).filter(from_nodes=["train_operator"]).nodes}
    assert "train_consistency" in following and "encode_latents" not in following
    unfolded = [node for name in parts for node in pipelines[name].nodes]
    assert {node.name for node in unfolded} == {node.name for node in full.nodes}
    assert not {str(node) for node in unfolded} & {str(node) for node in full.nodes}


def test_every_output_is_in_the_catalog(tmp_path: Path):
    """No output of a pipeline stays in memory for want of a catalog entry."""
    bootstrap_project(PROJECT)
    with KedroSession.create(PROJECT, env="smoke", runtime_params={"data_root": str(tmp_path)}) as session:
        catalog = session.load_context().catalog
    for name in pipelines:
        assert {output for output in pipelines[name].all_outputs() if output not in catalog} == set()


def test_training_nodes_take_what_their_stages_need():
    """The inputs of the nodes that train and tune a stage are those that the table of stages names.

    `train_diffusion` also needs the first verdict, so that a hopeless run stops before it.
    """
    bootstrap_project(PROJECT)
    nodes = {node.name: node for name in ("training", "tune") for node in pipelines[name].nodes}
    ending = re.compile("(_receipt)?(_if_any)?$")
    for stage in STAGES:
        for node in {f"train_{stage}", f"tune_{stage}"} & set(nodes):
            inputs = {ending.sub("", name) for name in nodes[node].inputs if not name.startswith("params:")}
            before = {"first_verdict"} if node == "train_diffusion" else set()
            assert inputs == set(STAGE_TABLE[stage].needs) | before, node


def test_no_dataset_is_an_edge_to_nearly_every_node():
    """Folders reach nodes as parameters, which Kedro-Viz hides: no dataset is an input of more than half the nodes."""
    bootstrap_project(PROJECT)
    nodes = pipelines["full"].nodes
    assert all("params:data_root" in node.inputs for node in nodes if node.name.startswith("train_"))
    inputs = [name for node in nodes for name in node.inputs if not name.startswith("params:")]
    assert max(inputs.count(name) for name in inputs) < len(nodes) / 2
