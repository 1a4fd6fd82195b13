"""Speed of exported models on the CPU: steps between physical fields, by each kind of file and by the eager model."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ups.config import BenchmarkConfig
from ups.data.families import Dataset
from ups.data.samples import domains
from ups.models.codec import codec_from
from ups.models.weights import load_model
from ups.performance.benchmark import Record, record
from ups.runs.machine import in_turns
from ups.runs.run import Run
from ups.surrogate.export import PhysicalModel, export
from ups.surrogate.surrogate import Surrogate
from ups.training.inputs import entries_of, open_cache
from ups.training.stages import STAGES

log = logging.getLogger(__name__)

Step = Callable[[], object]

BATCH_SIZE = 8
STEPS_AT_ONCE = 10  # between two looks at the clock


def export_records(run: Run, config: BenchmarkConfig) -> list[Record]:
    """Steps per second of the last dataset's family, each against the eager model; all are timed alternately.

    `run` is of the operator, whose weights are those before training.

    Raises:
        ConfigFault: a package or compiler is missing.
    """
    model, cpu = _untrained(replace(run, device="cpu"), config.datasets[-1].family), torch.device("cpu")
    inputs = model.example(BATCH_SIZE)
    folder = run.folder / "exported"
    steps: dict[str, Step] = {"eager": partial(model, *inputs)}
    loaders = {"pt2": _load_pt2, "onnx": _load_onnx} | ({"aoti": _load_aoti} if config.compiled_exports else {})
    for form, load in loaders.items():
        log.info("benchmark: export to %s", form)
        path = folder / f"model.{form}.pt2"
        export(model, path, form)
        steps[f"exported_{form}"] = load(path, inputs)
    if config.compiled_exports:
        steps["compiled"] = partial(torch.compile(model, dynamic=False), *inputs)
    with torch.no_grad():
        seconds = in_turns({name: partial(_repeat, step) for name, step in steps.items()}, config.rounds, cpu)
    per_second = {name: STEPS_AT_ONCE / value for name, value in seconds.items()}
    eager = per_second.pop("eager")
    unit = f"steps/s of {BATCH_SIZE} states"
    return [record(f"{name}_step_over_eager", value, unit, eager) for name, value in per_second.items()]


def _untrained(run: Run, family: str) -> PhysicalModel:
    """The operator of a run as it is before training, between the physical fields of a family."""
    codec = load_model(codec_from, run.data_root, run.inputs["latent_cache"]["codec"])
    entry, cache = STAGES[run.stage], open_cache(run, "transient")
    operator = entry.build(entry.config(**run.config), run).model
    dataset = Dataset.from_json(entries_of(cache, family)[0]["dataset"])
    return PhysicalModel(Surrogate(codec, operator, None, None, None, {}), dataset, domains(cache)[family])


def _repeat(step: Step) -> None:
    for _ in range(STEPS_AT_ONCE):
        step()


def _load_pt2(path: Path, inputs: tuple[Tensor, ...]) -> Step:
    return partial(torch.export.load(path).module(), *inputs)


def _load_onnx(path: Path, inputs: tuple[Tensor, ...]) -> Step:
    import onnxruntime  # of the extra `export`, as what the file was made with

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options)
    names = [each.name for each in session.get_inputs()]
    arrays = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
    return lambda: session.run(None, arrays)


def _load_aoti(path: Path, inputs: tuple[Tensor, ...]) -> Step:
    return partial(torch._inductor.aoti_load_package(str(path)), *inputs)
