"""The Kedro pipelines, one module each: first the functions that list nodes, then the functions of the nodes.

`plan`: sizes and times of a run before it starts; its check of sizes is part of `data`.
`data`: raw files to checked, split and normalized datasets.
`training`: codec, latents, operator, steady model, diffusion, consistency.
`evaluation`: coverage of the training split, corrector, scores; PDEBench's protocol.
`reporting`: figures, gates, report.
`deployment`: predict, for initial states in files; register.
`baselines`: FNO, U-Net and other models at equal cost, and the comparison with them.
`adaptation`: learning from a few trajectories of new files.
`studies`: ablation, compression, selection by physics, warnings of shifts, seeds, leaderboard.
`performance`: tune, profile, benchmark.

The lists of nodes do not repeat `launch` and the two folders of a run, `data_root` and `raw_root`: `step` adds them
to the inputs of every node whose function has such a parameter. They are parameters, which `ParameterHooks` has
made absolute paths, and not datasets, because these would add edges to nearly every node of the graph.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from kedro.pipeline import node
from kedro.pipeline.node import Node
from pydantic import BaseModel

from ups.data.sources import is_added, sources_of, unchanged
from ups.runs.progress import ProgressBar
from ups.runs.run import Run
from ups.runs.stage_cache import Receipt, cached_step, fingerprint
from ups.runs.torchrun import run_query

OF_EVERY_RUN = {"launch": "params:launch", "raw": "params:raw_root", "data_root": "params:data_root"}
STAGES = {stage: f"{stage}_receipt" for stage in ("codec", "operator", "steady", "diffusion", "consistency")}
"""Trained stage -> the dataset with its receipt."""


def step(
    function: Callable[..., Any],
    inputs: list[str] | dict[str, str],
    outputs: str | list[str] | None,
    *,
    name: str | None = None,
    tags: str | list[str] | None = None,
) -> Node:
    """A node, named after its function unless `name` is given.

    `inputs` are in the order of the function's parameters or by their names; its parameters `launch`, `raw` and
    `data_root` are added.
    """
    parameters = signature(function).parameters
    named = inputs if isinstance(inputs, dict) else dict(zip(parameters, inputs, strict=False))
    named = named | {parameter: source for parameter, source in OF_EVERY_RUN.items() if parameter in parameters}
    return node(function, named, outputs, name=name or function.__name__, tags=tags)


def cached(
    name: str, root: Path, place: str, module: str, config: BaseModel | None, inputs: dict[str, Any]
) -> "partial[Receipt]":
    """`cached_step` with all arguments but `work`: called with the work of step `name` it returns the receipt.

    The step's folder is below `root/place`, its key made of configuration, inputs and the code behind `module`.
    """
    return partial(cached_step, name, root / place, fingerprint(module, config, inputs), root=root)


def on_raw_files(
    work: Callable[[Path], Receipt], latent_cache: Receipt, raw: Path, data_root: Path
) -> Callable[[Path], Receipt]:
    """`work` that reads raw files; a `DataFault` where they are not those of which the latents were made."""

    def checked(folder: Path) -> Receipt:
        given = {name: entry for name, entry in sources_of(latent_cache).items() if not is_added(name)}
        with unchanged(raw, given, data_root):
            return work(folder)

    return checked


def on_ranks(module: str, run: Run, request: dict[str, Any], costs: dict[Path, float], unit: str) -> None:
    """Have the processes of a job write the files that are missing; `costs` are those of all files.

    Raises:
        Fault: from one of the processes, or LostWorker if one was killed or hung.
    """
    from ups.evaluation.parts import prepare

    prepare(run.folder)
    left = dict(costs)

    def show_done() -> None:
        for path in [path for path in left if path.is_file()]:
            bar.advance(1, left.pop(path))

    with ProgressBar(run.stage, len(costs), unit, sum(costs.values())) as bar:
        run_query(module, run, request, show_done)
