"""Pipeline `adapt`: trained networks learn from a few trajectories of new files, beside networks from scratch."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from kedro.pipeline import Pipeline
from rich import get_console

from ups.config import AdaptConfig, EvaluationConfig, LaunchConfig, SubsampleConfig
from ups.data.families import Dataset
from ups.data.inspection import inspect
from ups.data.pdebench import FAMILIES
from ups.data.recognition import digests_of
from ups.data.sources import find_families, list_files
from ups.errors import ConfigFault, DataFault
from ups.pipelines import STAGES, cached, step
from ups.pipelines.evaluation import trained_stages
from ups.runs.machine import device
from ups.runs.progress import ProgressBar
from ups.runs.stage_cache import Receipt

PLAIN = {stage: STAGES[stage] for stage in ("codec", "operator", "steady")} | {"latent_cache": "latent_cache"}


def create_pipeline() -> Pipeline:
    """Needs the models of `kedro run --pipeline training`, and `adapt.folder`."""
    models = PLAIN | {"data": "adapt_data", "config": "params:adapt"}
    steps = [
        step(describe_few, ["params:adapt", "params:subsample"], "adapt_data"),
        step(adapt_models, models, "adapt_receipt"),
        step(
            score_adapted,
            PLAIN | {"data": "adapt_data", "adapted": "adapt_receipt", "config": "params:evaluation"},
            "adapt_metrics",
        ),
        step(report_adapted, ["adapt_metrics", "adapt_receipt"], ["adapt_text", "adapt_figure"]),
    ]
    return Pipeline(steps, tags="adapt")


def describe_few(config: AdaptConfig, subsample: SubsampleConfig, data_root: Path) -> Receipt:
    """Check all values of the files, and hold trajectories out; the order of the others is random.

    Raises:
        ConfigFault: no folder is named.
        DataFault: a file is damaged or unknown, or too small for the least number of trajectories to learn from.
    """
    if config.folder is None:
        raise ConfigFault("adapt.folder is not set: name the folder of the new files, --params adapt.folder=DIR")
    folder = Path(config.folder).resolve()
    families = find_families(folder, FAMILIES.defined)
    names = list(families)
    options = {"subsample": subsample.of(set(families.values())), "seed": config.recipe.seed}
    # Validation trajectories are among those to learn from: `valid_fraction` is of the numbers in `sizes`.
    options |= {"test_fraction": config.test_fraction, "valid_fraction": min(0.25, (1 - config.test_fraction) / 2)}
    inputs = options | {"files": list_files(folder, data_root / "01_raw" / "checksums.json")}
    inputs |= {"families": digests_of(families.values())}

    def work(_: Path) -> Receipt:
        found = inspect("describe", folder=folder, names=names, **options)
        with ProgressBar(
            "check", sum(sum(each["counts"]) for each in found["datasets"].values()), "trajectories"
        ) as bar:
            for entry in found["datasets"].values():
                inspect("check", bar.advance, folder=folder, dataset=entry)
        rng = np.random.default_rng(config.recipe.seed)
        pools = {name: rng.permutation(split["train"] + split["valid"]) for name, split in found["splits"].items()}
        return found | {"pools": {name: pool.tolist() for name, pool in pools.items()}}

    described = cached("describe_few", data_root, "04_feature/adapt", "ups.data.splits", None, inputs)(work)
    for name, pool in described["pools"].items():
        if len(pool) < min(config.sizes):
            what = f"{folder}: {name} has {len(pool)} trajectories to learn from"
            raise DataFault(f"{what}, the least of adapt.sizes is {min(config.sizes)}: add trajectories or lower it")
    return described | {"folder": str(folder)}


def adapt_models(
    data: Receipt, config: AdaptConfig, launch: LaunchConfig, data_root: Path, **stages: Receipt
) -> Receipt:
    """Train networks on each number of trajectories: from the trained weights, from random ones, and an FNO."""
    import torch

    from ups.evaluation.external import trained_family
    from ups.runs.processes import memory_bytes
    from ups.training.adaptation import METHODS, train_and_save
    from ups.training.examples import expect_memory, read_trajectories
    from ups.training.starts import donors_of

    trained = trained_stages(stages, launch, data_root)
    surrogate, cache = trained.surrogate(device(launch)), trained.cache()
    methods = [method for method in METHODS if method != "fno" or config.fno is not None]

    def learn(method: str, dataset: Dataset, indices: list[int]) -> Receipt:
        inputs = {"data": data["fingerprint"], "dataset": asdict(dataset), "indices": indices, **stages}
        section = config.model_copy(update={"sizes": [len(indices)]})
        name, module = f"{method}_{len(indices)}", "ups.training.adaptation"

        def work(place: Path) -> Receipt:
            shown = read_trajectories(Path(data["folder"]), dataset, indices, device(launch))
            return train_and_save(place, method, surrogate, shown, section, data_root)

        return cached(name, data_root, "06_models/adapt", module, section, inputs | {"method": method})(work)

    datasets = {}
    for name, described in data["datasets"].items():
        dataset = Dataset.from_json(described)
        datasets[name] = replace(dataset, family=trained_family(dataset, cache))
        donors_of(surrogate, datasets[name], config.donor)  # before anything is trained: that there are some
    learned = {}
    for name, pool in data["pools"].items():
        dataset = datasets[name]
        sizes = [count for count in config.sizes if count <= len(pool)]
        expect_memory(dataset, max(sizes), memory_bytes(launch, torch.device(device(launch))))
        networks = {str(n): {method: learn(method, dataset, pool[:n]) for method in methods} for n in sizes}
        learned[name] = {"dataset": asdict(dataset), "networks": networks}
    return {"datasets": learned, "steps": config.steps}


def score_adapted(
    data: Receipt, adapted: Receipt, config: EvaluationConfig, launch: LaunchConfig, data_root: Path, **stages: Receipt
) -> list[dict[str, Any]]:
    """Score the trained model as it was and every adapted network on the held-out trajectories, in physical units."""
    from ups.evaluation.adaptation import score_networks

    trained, config = trained_stages(stages, launch, data_root), config.scores_only
    inputs = {"data": data["fingerprint"], "adapted": adapted, **stages}
    module = "ups.evaluation.adaptation"
    scored = cached("score_adapted", data_root, "07_model_output/adapt", module, config, inputs)
    return scored(lambda folder: score_networks(folder, trained, data, adapted, config, launch))["records"]


def report_adapted(metrics: list[dict[str, Any]], adapted: Receipt) -> tuple[str, Any]:
    """A table, and a Matplotlib figure of learning curves."""
    from ups.evaluation.adaptation import adapt_text, draw_curves

    text = adapt_text(metrics, adapted)
    get_console().print(text, soft_wrap=True)
    return text, draw_curves(metrics)
