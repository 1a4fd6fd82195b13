"""Scores of other files and other models: PDEBench files of a folder, baselines."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ups.config import EvaluationConfig, LaunchConfig
from ups.data.families import Dataset, base_of, condition_features
from ups.data.hdf5 import file_fault
from ups.data.inspection import inspect
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.data.samples import domains
from ups.evaluation.predictions import Compute, plain_method
from ups.evaluation.scores import TrajectorySet, held_out, score_sets
from ups.models.baselines import grid_model
from ups.models.codec import Codec, FieldGroup, codec_from, group_name
from ups.models.sizes import Domain
from ups.models.weights import load_model
from ups.runs.progress import ProgressBar
from ups.surrogate.surrogate import Surrogate
from ups.surrogate.trained import MODELS, Trained


def external_sets(
    folder: Path, names: list[str], subsample: dict[str, dict[str, Any]], trained: Trained
) -> list[TrajectorySet]:
    """What `subsample` leaves of the files `names`, whose families and grids must match those of the trained models.

    Raises:
        DataFault: a file is damaged, the models were not trained on its family or fields, or its grid is not divisible
            into their patches.
    """
    codec = load_model(MODELS["codec"], trained.data_root, trained.stages["codec"])
    cache = trained.cache()
    datasets = map(Dataset.from_json, inspect("find", folder=folder, names=names, subsample=subsample).values())
    return [_external_set(folder, dataset, codec, cache) for dataset in datasets]


def score_external(
    folder: Path, trained: Trained, sets: list[TrajectorySet], config: EvaluationConfig, launch: LaunchConfig
) -> dict[str, Any]:
    """Check every value of the files, then score them; arrays for figures are written into `folder`."""
    cost = sum(each.num_tokens * len(each.indices) for each in sets)
    with ProgressBar("check", sum(len(each.indices) for each in sets), "trajectories", cost) as bar:
        for each in sets:

            def advance(count: int, tokens: int = each.num_tokens) -> None:
                bar.advance(count, count * tokens)

            inspect("check", advance, folder=each.folder, dataset=asdict(each.dataset))
    compute = Compute.of(launch)
    return {"records": score_sets(folder, trained.surrogate(compute.device), sets, config, compute)}


def _external_set(folder: Path, dataset: Dataset, codec: Codec, cache: LatentCache) -> TrajectorySet:
    path, dataset = folder / dataset.files[0], replace(dataset, family=trained_family(dataset, cache))
    patch = _field_group(path, dataset, codec).patch
    if any(n % patch for n in dataset.grid):
        what = f"grid {' x '.join(map(str, dataset.grid))} is not divided by the codec's patch of {patch} points"
        raise file_fault(path, what, f"choose files with multiples of {patch} points per axis")
    domain = Domain(dataset.family, tuple(n // patch for n in dataset.grid), _periodic(dataset, cache))
    return TrajectorySet(folder, dataset, tuple(range(dataset.num_trajectories)), condition_features(dataset), domain)


def trained_family(dataset: Dataset, cache: LatentCache) -> str:
    """Of the variants of its family that models were trained on, that with the same boundary, then the same grid."""
    known = [Dataset.from_json(entry["dataset"]) for entry in cache.datasets.values()]
    variants = [other for other in known if base_of(other.family) == dataset.family]
    likeness = {v.family: (v.boundary == dataset.boundary, v.grid == dataset.grid) for v in variants}
    return max(likeness, key=likeness.__getitem__, default=dataset.family)


def _field_group(path: Path, dataset: Dataset, codec: Codec) -> FieldGroup:
    """The codec's part for the dataset's fields, which must be those of training."""
    name = group_name(dataset.family, "fields")
    if name not in codec.groups:
        known = ", ".join(sorted({group.partition("/")[0] for group in codec.groups}))
        raise file_fault(path, f"the model was not trained on {dataset.family} but on {known}", "leave the file out")
    fields, num_known = FAMILIES[dataset.family].fields, len(codec.groups[name].mean)
    if len(fields) != num_known:
        what = f"has the fields {', '.join(fields)}, the model was trained on {num_known} fields"
        raise file_fault(path, what, "train again with them")
    return codec.groups[name]


def _periodic(dataset: Dataset, cache: LatentCache) -> tuple[bool, ...]:
    """Axes that the models treat as periodic: those of training with equal boundary conditions, else of the file."""
    for entry in cache.datasets.values():
        known = Dataset.from_json(entry["dataset"])
        if (known.family, known.boundary) == (dataset.family, dataset.boundary):
            return domains(cache)[dataset.family].periodic
    return tuple(boundary == "periodic" for boundary in dataset.boundary)


def score_baselines(
    folder: Path,
    cache: LatentCache,
    receipts: dict[str, dict[str, dict[str, Any]]],
    identity_codec: dict[str, Any],
    config: EvaluationConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
) -> list[dict[str, Any]]:
    """Records of every kind of baseline on the test split of its family; `receipts` are by kind and family.

    `identity_codec` is the receipt of the codec with one token per grid point, on which baselines are trained.
    """
    records, sets, compute = [], held_out(cache, raw, "test"), Compute.of(launch)
    for kind, by_family in receipts.items():
        for family, receipt in by_family.items():
            surrogate = baseline_surrogate(family, receipt, identity_codec, compute.device, data_root)
            own = [each for each in sets if each.dataset.family == family]
            scored = score_sets(folder / kind, surrogate, own, config, compute)
            # The evaluation of the trained models has the scores of codec and persistence.
            records += [record | {"method": kind} for record in scored if record["method"] == plain_method(family)]
    return records


def baseline_surrogate(
    family: str, receipt: dict[str, Any], identity_codec: dict[str, Any], device: str | torch.device, data_root: Path
) -> Surrogate:
    """A surrogate with a baseline of one family as its operator, or as its steady model."""
    codec = load_model(codec_from, data_root, identity_codec).to(device)
    model = load_model(grid_model, data_root, receipt).to(device)
    is_steady = FAMILIES[family].steady
    return Surrogate(codec, None if is_steady else model, None, None, model if is_steady else None, {})
