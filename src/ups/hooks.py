"""Kedro hooks: parameters are checked before any work, a fault ends a run with one line, MLflow tracks every run."""

import atexit
import contextlib
import logging
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import CatalogProtocol
from kedro.pipeline import Pipeline
from pydantic import ValidationError

from ups.commands import FaultExit
from ups.config import LaunchConfig, Parameters, fields_at, masked, masked_value
from ups.data.pdebench import FAMILIES
from ups.datasets import Text
from ups.errors import ConfigFault, Fault, GateFailed, OutOfMemory, Preempted, StorageFault, nearest
from ups.files import from_here, read_json, resolved, storage_fault, storage_faults
from ups.runs import tracking
from ups.runs.agent import FirstNode
from ups.runs.machine import describe_machine, refuse_under_torchrun
from ups.runs.processes import is_out_of_memory, release_memory
from ups.runs.progress import INTERRUPTED, raise_if_stopped, stop_requested
from ups.runs.torchrun import is_watching
from ups.session import read_families

log = logging.getLogger(__name__)

# Former -> present name of a parameter; a former name is the end of the dotted one ("draws", "corrector.spreads").
RENAMED = {
    "draws": "family_weights_by_dimension",
    "experts": "separate_trunks",
    "corrector.memories": "corrector.noise_correlations",
    "corrector.spreads": "corrector.residual_scales",
    "corrector.student.min_evaluations": "corrector.student.min_evaluations_ratio",
    "corrector.student.min_wall_time": "corrector.student.min_wall_time_ratio",
    "selection.beam.candidates": "selection.beam.successors",
    "selection.where_off": "selection.if_corrector_off",
    "baselines.shares": "baselines.time_shares",
    "baselines.learning_rates": "baselines.learning_rate",
    "baselines.max_learning_rates": "baselines.max_trials",
    "benchmark.seconds": "benchmark.seconds_per_round",
    "benchmark.launches": "benchmark.num_launches",
    "benchmark.fields": "benchmark.loading_datasets",
    "benchmark.loading_dataset": "benchmark.loading_datasets",
    "benchmark.wide": "benchmark.large_model",
    "benchmark.wide_batch_tokens": "benchmark.large_batch_tokens",
}
DATA_PARAMETERS = ("source", "raw_root", "seed", "split", "subsample", "latents")
LESS_MEMORY = "free some memory, or lower `batch_tokens` of `corrector`, `evaluation` or `selection`"


class ParameterHooks:
    """Define families, check all parameters, and give nodes `data_root` and `raw_root` as absolute paths."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        parameters = dict(context.config_loader["parameters"])
        try:
            refuse_under_torchrun()
            read_families(context.config_loader, context.project_path)
            check_parameters(parameters)
            check_data_root(parameters["data_root"], context.config_loader["catalog"])
            check_inputs(parameters["evaluation"]["folder"], parameters["report"]["compare"])
        except Fault as fault:
            raise FaultExit(fault) from None
        context.config_loader["parameters"] = parameters | places(parameters, context.project_path)


class MemoryHooks:
    """After each step what it has freed is given back, so that every step has the whole of its memory."""

    @hook_impl
    def after_node_run(self) -> None:
        release_memory()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # for the training processes that use the same GPU


class TrackingHooks:
    """One MLflow run per `kedro run`: FINISHED, FAILED on an error, KILLED when interrupted.

    A fault ends the command with its exit code and one line; any other error is a defect of this project and ends it
    with a traceback and one line.
    """

    def __init__(self) -> None:
        self._data_root, self._parameters, self._started = Path(), dict[str, Any](), 0.0
        self._first_node: FirstNode | None = None

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._parameters = context.config_loader["parameters"]
        self._data_root = Path(self._parameters["data_root"])

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any]) -> None:
        names = run_params["pipeline_names"] or ["__default__"]
        tags = {"pipeline": ",".join(names), "env": run_params["env"] or "base"} | source_and_machine()
        self._started, launch = time.time(), LaunchConfig(**self._parameters["launch"])
        stop_requested.clear()  # an earlier run in this process may have failed
        try:
            if launch.num_nodes > 1:
                if any(name in run_params["runner"] for name in ("ThreadRunner", "ParallelRunner")):
                    raise ConfigFault("several nodes train one stage at a time: leave out --runner")
                self._tell_agents(Preempted("interrupted"))  # of an earlier run in this process
                self._first_node = FirstNode(self._data_root, launch)
                atexit.register(self._tell_agents, Preempted("interrupted"))
            with storage_faults(self._data_root):
                self._data_root.mkdir(parents=True, exist_ok=True)
                FAMILIES.write(self._data_root)
                tracking.open_run(",".join(names), self._data_root, tags, data_parameters(self._parameters))
        except Fault as fault:
            self._tell_agents(fault)
            raise FaultExit(fault) from None
        atexit.register(tracking.close_run, "KILLED")
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, _stop)

    @hook_impl
    def before_node_run(self) -> None:
        raise_if_stopped()  # while another step was running in a thread, or between two steps

    @hook_impl
    def on_node_error(self) -> None:
        stop_requested.set()  # the run has failed: steps in other threads end too, trainings after a checkpoint

    @hook_impl
    def after_pipeline_run(self, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        try:
            self._log_results()
        except Fault as fault:
            self._tell_agents(fault)
            raise FaultExit(fault) from None
        tracking.close_run("FINISHED")
        self._tell_agents(None)
        if not any(node.name == "require_pass" for node in pipeline.nodes):  # that says itself where its report is
            for path in texts_of(pipeline, catalog):
                log.info("written: %s", from_here(path))

    @hook_impl
    def on_pipeline_error(self, error: Exception) -> None:
        fault = _fault_behind(error)
        if isinstance(fault, GateFailed):
            self._log_results()
        tracking.close_run("KILLED" if isinstance(fault, Preempted) else "FAILED")
        fault = fault or _defect(error)
        self._tell_agents(fault)
        raise FaultExit(fault) from error

    def _tell_agents(self, fault: Fault | None) -> None:
        """Tell the agents of the other nodes how the run has ended."""
        if self._first_node is not None:
            with contextlib.suppress(StorageFault, OSError):  # then agents miss that this node is alive
                self._first_node.close(fault)

    def _log_results(self) -> None:
        """Track scores, grades and reports of a run that has written a verdict."""
        reports = self._data_root / "08_reporting"
        verdict, metrics = reports / "verdict.json", reports / "metrics.json"
        if verdict.is_file() and verdict.stat().st_mtime >= self._started:
            from ups.evaluation.records import summary

            tracking.log_results(*summary(read_json(metrics), read_json(verdict)), reports)


def texts_of(pipeline: Pipeline, catalog: CatalogProtocol) -> list[Path]:
    """The Markdown and HTML files that a pipeline writes and none of its nodes reads."""
    return [each.path for name in sorted(pipeline.outputs()) if isinstance(each := catalog.get(name), Text)]


def source_and_machine() -> dict[str, str]:
    """The git commit of the source and the machine, as tags of MLflow."""
    described = describe_machine("cpu", 1, 0)
    machine = f"{described['cpu']}, {described['cores']} cores, {described['memory_gib']} GiB, {described['system']}"
    return {"mlflow.source.git.commit": described["git"] or "not in a repository", "machine": machine}


def data_parameters(parameters: dict[str, Any]) -> dict[str, str]:
    """The parameters that say which data a run reads, by dotted names."""
    chosen = {name: parameters[name] for name in DATA_PARAMETERS}
    chosen |= {f"simulate.{name}": parameters["simulate"][name] for name in ("fill_below", "fill_to")}
    source = {"simulate": "simulate", "pdebench": "download"}.get(parameters["source"])
    chosen |= {source: parameters[source]} if source else {}
    return {name: masked_value(str(value)).strip("'") for name, value in tracking.flatten(chosen).items()}


def _stop(number: int, _: FrameType | None) -> None:
    """End this command: at once, or after a training job has saved its step; a second signal does not wait for that."""
    stop_requested.set()
    signal.signal(number, signal.SIG_DFL)
    if not is_watching():
        stopped = FaultExit(Preempted(INTERRUPTED))
        stopped.show()
        sys.exit(stopped.exit_code)


def _fault_behind(error: BaseException | None) -> Fault | None:
    """The fault that an error stands for: one that Kedro wrapped, or a full disk or memory; None for other errors."""
    while error is not None and not isinstance(error, Fault):
        if isinstance(error, OSError) and (fault := storage_fault(error)) is not None:
            return fault
        if is_out_of_memory(error):
            what = str(error).partition("\n")[0] or "no memory is left"
            return OutOfMemory(f"{what}; {LESS_MEMORY}")
        error = error.__cause__
    return error


def _defect(error: BaseException) -> Fault:
    """The fault for a defect of this project; its traceback is printed to show the place."""
    traceback.print_exception(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return Fault(f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")


def check_parameters(parameters: dict[str, Any]) -> None:
    """Check every section and value, except sections with a leading underscore (YAML anchors).

    Raises:
        ConfigFault: naming each wrong parameter, what is wrong with it, and the nearest known name.
    """
    try:
        Parameters.model_validate({name: value for name, value in parameters.items() if not name.startswith("_")})
    except ValidationError as error:
        raise ConfigFault("; ".join(_explain(problem) for problem in error.errors())) from None


def places(parameters: dict[str, Any], project: Path) -> dict[str, Path]:
    """`data_root` and `raw_root` as absolute paths; relative ones start at the project folder, as in the catalog."""
    data_root = (project / parameters["data_root"]).resolve()
    raw_root = parameters["raw_root"]
    return {"data_root": data_root, "raw_root": resolved(raw_root, project) if raw_root else data_root / "01_raw"}


def check_data_root(data_root: str, catalog: dict[str, Any]) -> None:
    """Check that the catalog, which cannot read parameters, has the data root that the parameters name.

    Raises:
        ConfigFault: `data_root` is set among the parameters: nodes would write there, the catalog elsewhere.
    """
    used = catalog["latent_cache"]["data_root"]
    if data_root != used:
        raise ConfigFault(
            f"data_root = {data_root} does not reach the catalog, which has {used}: set it by --params "
            f"data_root={data_root}, or in globals.yml of the environment, not in its parameters"
        )


def check_inputs(folder: str | None, compared: list[str]) -> None:
    """Check what a run reads last: the files of `evaluation.folder`, and the scores of the runs in `report.compare`.

    Raises:
        ConfigFault: there is no such folder.
        DataFault: a run has no scores.
    """
    if folder is not None and not Path(folder).is_dir():
        raise ConfigFault(f"evaluation.folder = {folder}: there is no such folder; name one with files to score")
    if compared:
        from ups.evaluation.report import scores_of

        for root in compared:
            scores_of(Path(root))


def _explain(problem: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        if (renamed := _present_name(".".join(part for part in problem["loc"] if isinstance(part, str)))) is not None:
            return f"parameter {place} is now called {renamed}"
        known = fields_at(problem["loc"][:-1])
        return f"unknown parameter {place}{nearest(str(problem['loc'][-1]), known)}"
    if problem["type"] == "missing":
        return f"parameter {place} is missing"
    message = masked(problem["msg"].removeprefix("Value error, "))
    if problem["type"] == "value_error":
        return f"{place}: {message}" if place else message
    return f"parameter {place} = {masked_value(problem['input'])}: {message[0].lower()}{message[1:]}"


def _present_name(place: str) -> str | None:
    """The present name of a renamed parameter; None for one that never existed."""
    names = (place.removesuffix(old) + new for old, new in RENAMED.items() if f".{place}".endswith(f".{old}"))
    return next(names, None)
