"""PDEBench files that no stage has seen: what a trained model can be asked about them, and its scores there."""

from pathlib import Path
from typing import Any

from ups.config import EvaluationConfig
from ups.data.condition import condition_features
from ups.data.dataset import Dataset
from ups.data.hdf5 import bad_file
from ups.data.latent_cache import LatentCache
from ups.data.normalization import check_values
from ups.data.pdebench import FAMILIES
from ups.data.samples import domains
from ups.data.trajectories import gather
from ups.evaluation.evaluate import Subject
from ups.evaluation.score import MODELS, Trained, score_subjects
from ups.models.codec import Codec, FieldGroup, group_name
from ups.models.domain import Domain
from ups.models.weights import load_model
from ups.progress import ProgressBar


def find_subjects(folder: Path, names: list[str], trained: Trained) -> list[Subject]:
    """All trajectories of the files, if the trained models know their families and fit their grids.

    Raises:
        DataFault: a file is damaged, or its family, fields or grid are not for these models.
    """
    codec = load_model(MODELS["codec"], trained.data_root, trained.stages["codec"])
    cache = trained.cache()
    return [_subject(folder, dataset, codec, cache) for dataset in gather(folder, names).values()]


def score_external(
    folder: Path, trained: Trained, subjects: list[Subject], config: EvaluationConfig, device: str
) -> dict[str, Any]:
    """Check every value, then evaluate; arrays as for figures go into `folder`, records are returned."""
    with ProgressBar("check", sum(len(subject.trajectories) for subject in subjects), "trajectories") as bar:
        for subject in subjects:
            check_values(subject.folder, subject.dataset, bar.advance)
    return {"records": score_subjects(folder, trained.emulator(device), subjects, config, device)}


def _subject(folder: Path, dataset: Dataset, codec: Codec, cache: LatentCache) -> Subject:
    group = _known_group(folder, dataset, codec)
    if any(n % group.patch for n in dataset.grid):
        what = f"grid {' x '.join(map(str, dataset.grid))} is not divided by the codec's patch of {group.patch} points"
        raise bad_file(folder / dataset.files[0], what, f"choose files with multiples of {group.patch} points per axis")
    token_grid = tuple(n // group.patch for n in dataset.grid)
    domain = Domain(list(FAMILIES).index(dataset.family), token_grid, _periodic(dataset, cache))
    everything = tuple(range(dataset.num_trajectories))
    return Subject(folder, dataset, everything, condition_features(dataset), domain)


def _known_group(folder: Path, dataset: Dataset, codec: Codec) -> FieldGroup:
    """The codec's group of the dataset's fields."""
    path, name = folder / dataset.files[0], group_name(dataset.family, "fields")
    if name not in codec.groups:
        known = ", ".join(sorted({group.partition("/")[0] for group in codec.groups}))
        raise bad_file(path, f"the model was not trained on {dataset.family}, it knows {known}", "leave the file out")
    fields, num_known = FAMILIES[dataset.family].fields, len(codec.groups[name].mean)
    if len(fields) != num_known:
        what = f"has the fields {', '.join(fields)}, the model was trained on {num_known} fields"
        raise bad_file(path, what, "train again with them")
    return codec.groups[name]


def _periodic(dataset: Dataset, cache: LatentCache) -> tuple[bool, ...]:
    """Which axes are periodic: those of the file, or what the models took for these boundaries when they learned."""
    for entry in cache.datasets.values():
        known = Dataset.from_json(entry["dataset"])
        if (known.family, known.boundary) == (dataset.family, dataset.boundary):
            return domains(cache)[dataset.family].periodic
    return tuple(boundary == "periodic" for boundary in dataset.boundary)
