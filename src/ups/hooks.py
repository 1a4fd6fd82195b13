"""What concerns every run: parameters checked before any work, faults told in one line, one MLflow run."""

import atexit
import difflib
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import click
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from pydantic import BaseModel, ValidationError

from ups.config import Parameters
from ups.errors import ConfigFault, Fault, OutOfMemory, Preempted, StorageFault
from ups.files import REMEDY, UNUSABLE, storage_faults
from ups.launch import refuse_under_torchrun
from ups.torchrun import is_watching, stop_requested

LESS_MEMORY = "free some memory, or lower `batch_tokens` of `corrector`, `evaluation` or `selection`"


class FaultExit(click.ClickException):
    """Ends the command line with a fault's exit code and one line."""

    def __init__(self, exit_code: int, line: str) -> None:
        super().__init__(line)
        self.exit_code = exit_code

    def show(self, file: Any = None) -> None:
        click.echo(self.message, file=file or sys.stderr)


def fault_exit(fault: Fault) -> FaultExit:
    """`FAULT <code> <kind>: <what and remedy>` on one line."""
    return FaultExit(fault.exit_code, f"FAULT {fault.exit_code} {fault.kind}: {' '.join(str(fault).split())}")


class ParameterHooks:
    """All parameters are checked, whatever is run."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        parameters = dict(context.config_loader["parameters"])
        try:
            refuse_under_torchrun()
            check_parameters(parameters)
            check_places(parameters, context.config_loader["catalog"])
        except Fault as fault:
            raise fault_exit(fault) from None


class TrackingHooks:
    """One MLflow run per `kedro run`: FINISHED, FAILED on an error, KILLED when interrupted.

    A fault, wherever it arose, ends the command with its exit code and one line; any other error is a defect of ours,
    whose one line stands below its traceback.
    """

    def __init__(self) -> None:
        self._data_root = Path()

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._data_root = (context.project_path / context.config_loader["parameters"]["data_root"]).resolve()

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any]) -> None:
        from ups import tracking

        names = run_params["pipeline_names"] or ["__default__"]
        tags = {"pipeline": ",".join(names), "env": run_params["env"] or "base"}
        try:
            with storage_faults(self._data_root):
                tracking.open_run(",".join(names), self._data_root, tags)
        except Fault as fault:
            raise fault_exit(fault) from None
        atexit.register(tracking.close_run, "KILLED")
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, _stop)

    @hook_impl
    def after_pipeline_run(self) -> None:
        from ups import tracking

        tracking.close_run("FINISHED")

    @hook_impl
    def on_pipeline_error(self, error: Exception) -> None:
        from ups import tracking

        fault = _fault_behind(error)
        tracking.close_run("KILLED" if isinstance(fault, Preempted) else "FAILED")
        raise fault_exit(fault or _defect(error)) from error


def _stop(number: int, _: FrameType | None) -> None:
    """End this command: a job first saves its step, anything else stops at once. The second signal does not wait."""
    stop_requested.set()
    signal.signal(number, signal.SIG_DFL)
    if not is_watching():
        stopped = fault_exit(Preempted("interrupted; the same command goes on with the step it was in"))
        stopped.show()
        sys.exit(stopped.exit_code)


def _fault_behind(error: BaseException | None) -> Fault | None:
    """The fault that Kedro may have wrapped, as when a dataset cannot be loaded; no disk or no memory is one too."""
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
    from ups.training.memory import is_out_of_memory

    return is_out_of_memory(error)


def _defect(error: BaseException) -> Fault:
    """The fault of an error that only we can have made; its traceback is printed, for it alone says where."""
    traceback.print_exception(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return Fault(f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")


def check_parameters(parameters: dict[str, Any]) -> None:
    """Check every section and value; a name that begins with an underscore is a building block for others.

    Raises:
        ConfigFault: naming each wrong parameter, what is wrong with it, and the nearest known name.
    """
    try:
        Parameters.model_validate({name: value for name, value in parameters.items() if not name.startswith("_")})
    except ValidationError as error:
        raise ConfigFault("; ".join(_explain(problem) for problem in error.errors())) from None


def check_places(parameters: dict[str, Any], catalog: dict[str, Any]) -> None:
    """Check that the catalog has the places that the parameters name, for it cannot read parameters.

    Raises:
        ConfigFault: a place is set among the parameters of an environment, where it would be obeyed by halves.
    """
    for name, entry in {"data_root": "data_root", "raw_root": "raw"}.items():
        given, used = parameters[name], catalog[entry]["filepath"]
        if given not in (None, used):
            raise ConfigFault(
                f"{name} = {given} does not reach the catalog, which has {used}: set it by --params {name}={given}, "
                f"or in globals.yml of the environment, not in its parameters"
            )


def _explain(problem: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = _fields_at(problem["loc"][:-1])
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, 1)
        return f"unknown parameter {place}" + (f", did you mean {near[0]}?" if near else f"; known: {', '.join(known)}")
    if problem["type"] == "missing":
        return f"parameter {place} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{place}: {message}" if place else message
    return f"parameter {place} = {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _fields_at(place: tuple[int | str, ...]) -> list[str]:
    section: Any = Parameters
    for part in place:
        section = section.model_fields[part].annotation if isinstance(part, str) else section.__args__[0]
    assert issubclass(section, BaseModel)
    return list(section.model_fields)
