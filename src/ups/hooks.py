"""Kedro hooks: parameters are checked before any work, a fault ends a run with one line, MLflow tracks every run."""

import atexit
import difflib
import math
import os
import signal
import sys
import traceback
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from kedro.config import MissingConfigException, OmegaConfigLoader
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from ups.commands import FaultExit
from ups.config import Parameters, masked, masked_value
from ups.errors import ConfigFault, Fault, OutOfMemory, Preempted, StorageFault
from ups.files import REMEDY, UNUSABLE, storage_faults
from ups.runs import tracking
from ups.runs.machine import refuse_under_torchrun
from ups.runs.torchrun import is_watching, stop_requested

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
    "benchmark.seconds": "benchmark.seconds_per_round",
    "benchmark.launches": "benchmark.num_launches",
    "benchmark.fields": "benchmark.loading_dataset",
    "benchmark.wide": "benchmark.large_model",
    "benchmark.wide_batch_tokens": "benchmark.large_batch_tokens",
}
# Values that an entry of the catalog may have. A type is imported and called, and so are some arguments, such as
# `validator` and Matplotlib's `backend`: a catalog with others could run code.
DATASETS = ("JSON", "Records", "LatentCacheReceipt", "Markdown", "Pages")
TYPES = {*(f"ups.datasets.{name}" for name in DATASETS), "json.JSONDataset", "matplotlib.MatplotlibDataset"}
ARGUMENTS = {"type", "filepath", "data_root", "optional", "save_args", "metadata"}
SAVE_ARGUMENTS = {"dpi", "indent", "allow_nan"}
# Raised by Kedro on files that are no YAML or hold something else than sections; the last two on a list.
UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, MissingConfigException, ValueError, RecursionError)
UNREADABLE += (AttributeError, TypeError)
MAX_ALIASED_VALUES = 10_000  # in a file; Kedro takes a millisecond for three
LESS_MEMORY = "free some memory, or lower `batch_tokens` of `corrector`, `evaluation` or `selection`"


class ConfigLoader(OmegaConfigLoader):
    """Kedro's loader; what it cannot read, and a catalog that `check_catalog` refuses, end the command in one line."""

    def __init__(self, conf_source: str, env: str | None = None, **options: Any) -> None:
        folder = Path(conf_source)
        chosen = env or options["default_run_env"]
        if folder.is_dir() and not (folder / chosen).is_dir():
            known = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
            raise FaultExit(ConfigFault(f"{folder} has no environment {chosen!r}: choose one of {known}, or make it"))
        for path in chain.from_iterable(sorted((folder / name).rglob("*")) for name in (options["base_env"], chosen)):
            check_aliases(path)
        super().__init__(conf_source, env, **options)

    def __getitem__(self, key: str) -> dict[str, Any]:
        try:
            content = super().__getitem__(key)
        except MissingConfigException:
            if key in ("globals", "credentials"):  # Kedro can do without
                raise
            raise FaultExit(ConfigFault(f"{self.conf_source}: has no {key}*.yml; restore conf/base")) from None
        except UNREADABLE as error:
            what = f"{self.conf_source}, {key}*.yml of {self.base_env} or {self.env or self.default_run_env}"
            why = "expected sections, not a list" if isinstance(error, AttributeError | TypeError) else error
            raise FaultExit(ConfigFault(f"{what}: {why}; correct the file")) from None
        if key == "catalog":
            try:
                check_catalog(content)
            except ConfigFault as fault:
                raise FaultExit(fault) from None
        return content


def check_aliases(path: Path) -> None:
    """Refuse a file in which few lines stand for many values, by aliases of aliases: reading it would never end."""
    if path.suffix not in (".yml", ".yaml", ".json") or not path.is_file() or b"*" not in (text := path.read_bytes()):
        return
    try:
        if _count_values(yaml.compose(text, Loader=yaml.SafeLoader), {}) > MAX_ALIASED_VALUES:
            what = f"its aliases stand for more than {MAX_ALIASED_VALUES} values"
            raise FaultExit(ConfigFault(f"{path}: {what}; write out what you need"))
    except UNREADABLE as error:
        raise FaultExit(ConfigFault(f"{path}: {error}; correct the file")) from None


def _count_values(node: yaml.Node | None, known: dict[int, float]) -> float:
    """Values of a node, those behind its aliases included; infinite for one that contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        nodes = node.value if isinstance(node, yaml.CollectionNode) else []
        nodes = chain.from_iterable(nodes) if isinstance(node, yaml.MappingNode) else nodes
        known[id(node)] = 1 + sum(_count_values(child, known) for child in nodes)
    return known[id(node)]


class ParameterHooks:
    """Check all parameters, whichever pipeline runs, and give nodes `data_root` and `raw_root` as absolute paths."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        parameters = dict(context.config_loader["parameters"])
        try:
            refuse_under_torchrun()
            check_parameters(parameters)
            check_data_root(parameters["data_root"], context.config_loader["catalog"])
        except Fault as fault:
            raise FaultExit(fault) from None
        context.config_loader["parameters"] = parameters | places(parameters, context.project_path)


class TrackingHooks:
    """One MLflow run per `kedro run`: FINISHED, FAILED on an error, KILLED when interrupted.

    A fault ends the command with its exit code and one line; any other error is a defect of this project and ends it
    with a traceback and one line.
    """

    def __init__(self) -> None:
        self._data_root = Path()

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._data_root = Path(context.config_loader["parameters"]["data_root"])

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any]) -> None:
        names = run_params["pipeline_names"] or ["__default__"]
        tags = {"pipeline": ",".join(names), "env": run_params["env"] or "base"}
        try:
            with storage_faults(self._data_root):
                self._data_root.mkdir(parents=True, exist_ok=True)
                tracking.open_run(",".join(names), self._data_root, tags)
        except Fault as fault:
            raise FaultExit(fault) from None
        atexit.register(tracking.close_run, "KILLED")
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, _stop)

    @hook_impl
    def after_pipeline_run(self) -> None:
        tracking.close_run("FINISHED")

    @hook_impl
    def on_pipeline_error(self, error: Exception) -> None:
        fault = _fault_behind(error)
        tracking.close_run("KILLED" if isinstance(fault, Preempted) else "FAILED")
        raise FaultExit(fault or _defect(error)) from error


def _stop(number: int, _: FrameType | None) -> None:
    """End this command: at once, or after a training job has saved its step; a second signal does not wait for that."""
    stop_requested.set()
    signal.signal(number, signal.SIG_DFL)
    if not is_watching():
        stopped = FaultExit(Preempted("interrupted; the same command resumes the step that was interrupted"))
        stopped.show()
        sys.exit(stopped.exit_code)


def _fault_behind(error: BaseException | None) -> Fault | None:
    """The fault that an error stands for: one that Kedro wrapped, or a full disk or memory; None for other errors."""
    while error is not None and not isinstance(error, Fault):
        if isinstance(error, OSError) and error.errno in UNUSABLE:
            return StorageFault(f"{error.filename or 'a file'}: {os.strerror(error.errno)}; {REMEDY}")
        if _is_out_of_memory(error):
            what = str(error).partition("\n")[0] or "no memory is left"
            return OutOfMemory(f"{what}; {LESS_MEMORY}")
        error = error.__cause__
    return error


def _is_out_of_memory(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    from ups.training.update import is_out_of_memory

    return is_out_of_memory(error)


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
    raw_root = data_root / "01_raw" if parameters["raw_root"] is None else (project / parameters["raw_root"]).resolve()
    return {"data_root": data_root, "raw_root": raw_root}


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


def check_catalog(catalog: dict[str, Any]) -> None:
    """Check that every entry is of a type of `conf/base` with its arguments, and a file of this machine.

    Raises:
        ConfigFault: an entry could run code, or would be read from or written to a network address.
    """
    for name, entry in catalog.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("filepath"), str):
            raise ConfigFault(f"catalog entry {name!r}: expected a section with type and filepath")
        if not isinstance(entry.get("type"), str) or entry["type"] not in TYPES:
            allowed = ", ".join(sorted(TYPES))
            raise ConfigFault(f"catalog entry {name!r}: type {entry.get('type')!r} is not allowed; allowed: {allowed}")
        unknown = [key for key in entry if key not in ARGUMENTS]
        save_args = entry.get("save_args", {})
        if not isinstance(save_args, dict):
            raise ConfigFault(f"catalog entry {name!r}: save_args is {save_args!r}, expected a section")
        unknown += [f"save_args.{key}" for key in save_args if key not in SAVE_ARGUMENTS]
        if unknown:
            raise ConfigFault(f"catalog entry {name!r}: remove {', '.join(map(repr, unknown))}, which is not allowed")
        for place in (entry["filepath"], entry.get("data_root", "")):
            if "://" in str(place) or "::" in str(place):
                raise ConfigFault(f"catalog entry {name!r}: {place!r} is a network address; name a local folder")


def _explain(problem: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        if (renamed := _present_name(".".join(part for part in problem["loc"] if isinstance(part, str)))) is not None:
            return f"parameter {place} is now called {renamed}"
        known = _fields_at(problem["loc"][:-1])
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, 1)
        return f"unknown parameter {place}" + (f", did you mean {near[0]}?" if near else f"; known: {', '.join(known)}")
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


def _fields_at(place: tuple[int | str, ...]) -> list[str]:
    section: Any = Parameters
    for part in place:
        section = section.model_fields[part].annotation if isinstance(part, str) else section.__args__[0]
    assert issubclass(section, BaseModel)
    return list(section.model_fields)
