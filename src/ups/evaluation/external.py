"""Scores of other files and other models: a folder of PDEBench files, predictions, baselines."""

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.config import EvaluationConfig, LaunchConfig
from ups.data.families import Dataset, Family, base_of, condition_features
from ups.data.field_files import FieldFile, open_fields
from ups.data.hdf5 import file_fault
from ups.data.inspection import inspect
from ups.data.latent_cache import LatentCache
from ups.data.normalization import check_trajectory
from ups.data.pdebench import FAMILIES
from ups.data.recognition import warn_of_lengths
from ups.data.samples import domains
from ups.data.sources import is_added, md5_of
from ups.data.trajectories import TrajectoryReader
from ups.errors import ConfigFault
from ups.evaluation.entries import Described, scored_trajectories
from ups.evaluation.kept import Origin, expect_like
from ups.evaluation.parts import score_sets
from ups.evaluation.predictions import Batch, Compute, Predicted, Slab, plain_method
from ups.evaluation.records import records_of_method
from ups.evaluation.scores import TrajectorySet, held_out, score_batch, suite_of
from ups.models.baselines import grid_model
from ups.models.codec import Codec, FieldGroup, codec_from, group_name
from ups.models.sizes import Domain
from ups.models.weights import load_model
from ups.runs.progress import ProgressBar
from ups.surrogate.surrogate import Setting, Surrogate
from ups.surrogate.trained import MODELS, Trained


def external_sets(
    folder: Path, md5: dict[str, str], subsample: dict[str, dict[str, Any]], trained: Trained
) -> list[TrajectorySet]:
    """What `subsample` leaves of the files in `md5`, by name; their families and grids must match those of training.

    Raises:
        DataFault: a file is damaged, the models were not trained on its family or fields, or its grid is not divisible
            into their patches.
    """
    codec = load_model(MODELS["codec"], trained.data_root, trained.stages["codec"])
    cache = trained.cache()
    datasets = map(Dataset.from_json, inspect("find", folder=folder, names=list(md5), subsample=subsample).values())
    return [replace(_external_set(folder, dataset, codec, cache), md5=md5) for dataset in datasets]


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
    return {"records": score_sets(folder, trained.surrogate(compute.device), sets, config, compute, examples=True)}


def _external_set(folder: Path, dataset: Dataset, codec: Codec, cache: LatentCache) -> TrajectorySet:
    path, dataset = folder / dataset.files[0], replace(dataset, family=trained_family(dataset, cache))
    patch = _field_group(path, dataset, codec).patch
    if any(n % patch for n in dataset.grid):
        what = f"grid {' x '.join(map(str, dataset.grid))} is not divided by the codec's patch of {patch} points"
        raise file_fault(path, what, f"choose files with multiples of {patch} points per axis")
    known = [Dataset.from_json(each["dataset"]) for each in cache.datasets.values()]
    warn_of_lengths([next((each for each in known if each.family == dataset.family), dataset), dataset])
    domain = Domain(dataset.family, tuple(n // patch for n in dataset.grid), _periodic(dataset, cache))
    return TrajectorySet(folder, dataset, tuple(range(dataset.num_trajectories)), condition_features(dataset), domain)


def trained_family(dataset: Dataset, cache: LatentCache) -> str:
    """Of the variants of its family that models were trained on, that with the same boundary, then the same grid."""
    known = [Dataset.from_json(entry["dataset"]) for entry in cache.datasets.values()]
    variants = [other for other in known if base_of(other.family) == base_of(dataset.family)]
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


def score_predictions(
    predictions: Path,
    truth: Path,
    family: str | None,
    method: str | None,
    compute: Compute,
    seed: int,
    test_split_of: Path | None,
) -> dict[str, Any]:
    """Records of the rollouts in a file of predictions, of whatever model, against the PDEBench file `truth`.

    The predictions have the shapes of the truth, with an initial snapshot that is not scored; ensembles have an axis of
    members. Those that the evaluation has kept know their test trajectories and settings, and give its records to the
    last digit. Others are of the test split of `truth` in the data root `test_split_of`, in its order, or without a
    data root of all trajectories of `truth`, whose family is found by its name unless `family` is given.

    Returns:
        The content of a file for the leaderboard: `method`, `dataset`, `family`, `trajectories` (which were scored, as
        `scored_trajectories`) and `records`, as in metrics.json.

    Raises:
        ConfigFault: both `family` and `test_split_of` are given.
        DataFault: a file is damaged, the predictions have other shapes than the truth, or a value of the truth cannot
            be scored; or `truth` is no file of `test_split_of`, or not the truth of predictions that were kept.
    """
    if family is not None and test_split_of is not None:
        raise ConfigFault(f"{test_split_of} knows the family of {truth.name}: leave out --family")
    if test_split_of is None:
        found = inspect("describe_file", path=truth, family=family)
        FAMILIES.define(*(Family(**definition) for definition in found["definitions"]))
        dataset = Dataset.from_json(found["dataset"])
        indices = list(range(dataset.num_trajectories))
    else:
        dataset, indices = _test_split(test_split_of, truth)
    with open_fields(predictions, FAMILIES[dataset.family]) as file:
        kept = Origin.of(predictions, file.attributes)
        if kept and truth.name not in (files := [Path(name).name for name in kept.dataset["files"]]):
            remedy = f"choose {' or '.join(files)}"
            raise file_fault(truth, f"is not the truth of {predictions.name}, which the evaluation has kept", remedy)
        md5 = _md5_of(truth.parent, dataset if kept is None else Dataset.from_json(kept.dataset))
        if kept and md5 != kept.md5:
            what = f"has another content than when the evaluation kept {predictions.name}"
            raise file_fault(truth, what, "name the file of that run")
        origin = kept or _origin(dataset, md5, indices, predictions.stem, compute, file, seed)
        dataset, method = Dataset.from_json(origin.dataset), method or origin.method
        part = "" if len(origin.indices) == dataset.num_trajectories else "the test split of "
        expect_like(file, dataset, len(origin.indices), f"{part}{truth}")
        suite = suite_of(dataset, origin.seed)
        with TrajectoryReader(truth.parent, dataset) as reader, torch.inference_mode():
            for start in range(0, len(origin.indices), origin.batch_size):
                chosen = slice(start, start + origin.batch_size)
                for index in origin.indices[chosen]:
                    check_trajectory(reader, index)
                batch = _batch(reader, origin, chosen, compute.device)
                predictor = partial(_read_slab, file, method, start, compute.device)
                score_batch(_no_latents, batch, [predictor], {(method, "rollout"): suite})
    mode = {} if origin.mode is None else {"mode": origin.mode}
    return {
        "method": method,
        "dataset": dataset.name,
        "family": dataset.family,
        "trajectories": scored_trajectories(origin.dataset, md5, origin.indices),
        "records": [record | mode for record in records_of_method(dataset, method, "rollout", suite)],
    }


def _test_split(root: Path, truth: Path) -> tuple[Dataset, list[int]]:
    """The dataset of a data root that the file `truth` belongs to, and the trajectories of its test split."""
    FAMILIES.read(root)
    found = Described.below(root)
    files = {file: name for name, entry in found.datasets.items() for file in entry["files"]}
    if truth.name not in files:
        raise file_fault(truth, f"is no file of {root}", f"choose one of {', '.join(files)}")
    if not truth.exists():
        raise file_fault(truth, "no such file", f"name the file of the run in {root}")
    name = files[truth.name]
    dataset = Dataset.from_json(found.datasets[name])
    for file, md5 in _md5_of(truth.parent, dataset).items():
        if found.sources[file].md5 != md5:
            raise file_fault(truth.parent / file, f"has another content than in {root}", "name the file of that run")
    return dataset, found.splits[name]["test"]


def _md5_of(folder: Path, dataset: Dataset) -> dict[str, str]:
    """MD5 by name of the files of a dataset, without those that were simulated for training."""
    names = [name for name in dataset.files if not is_added(name)]
    for name in names:
        if not (folder / name).exists():
            raise file_fault(folder / name, "no such file", f"all files of {dataset.name} must be in this folder")
    return {name: md5_of(folder / name) for name in names}


def _origin(
    dataset: Dataset,
    md5: dict[str, str],
    indices: list[int],
    method: str,
    compute: Compute,
    file: FieldFile,
    seed: int,
) -> Origin:
    """These trajectories of a dataset, in pieces that fit into memory."""
    snapshot_bytes = 4 * len(FAMILIES[dataset.family].fields) * math.prod(dataset.grid)
    fitting = max(1, compute.num_snapshots(snapshot_bytes, file.first.members or 1))
    rows = min(max(1, fitting // len(dataset.times)), len(indices))
    return Origin(asdict(dataset), md5, method, None, indices, rows, rows, max(1, fitting // rows), seed)


def _batch(reader: TrajectoryReader, origin: Origin, chosen: slice, device: torch.device) -> Batch:
    indices, family = tuple(origin.indices[chosen]), reader.dataset.family
    setting = Setting(family, Domain(family, (), ()), torch.zeros(0), torch.zeros(0))
    rows = [slice(first, first + origin.rows) for first in range(0, len(indices), origin.rows)]
    return Batch(reader, indices, setting, device, origin.num_steps, rows, 1)


def _no_latents(u: Tensor, family: str) -> Tensor:
    """Latents (B, T, 0, 0), where no model needs them."""
    return u.new_zeros(*u.shape[:2], 0, 0)


def _read_slab(file: FieldFile, method: str, start: int, device: torch.device, slab: Slab) -> list[Predicted]:
    """What a file predicts for a slab of the trajectories from `start` on."""
    first = slab.start + (slab.u_0 is not None)
    times, num_members = slice(first, first + slab.target.shape[1]), file.first.members or 1

    def members(rows: slice) -> Iterator[Tensor]:
        places = range(start, start + len(slab.target))[rows]
        for half in np.array_split(np.arange(num_members), min(2, num_members)):
            u = np.stack([[file.read(row, int(member), times) for row in places] for member in half])
            yield torch.from_numpy(u).to(device)

    return [Predicted(method, ("rollout",), slice(None), members)]


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
            scored = score_sets(folder / kind, surrogate, own, config.scores_only, compute)
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
