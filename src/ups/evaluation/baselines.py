"""The baselines scored as the multi-task model is: same trajectories, horizons and metrics, as records of their own."""

from pathlib import Path
from typing import Any

from ups.config import EvaluationConfig
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.emulator import Emulator
from ups.evaluation.evaluate import held_out
from ups.evaluation.predict import plain_method
from ups.evaluation.score import score_subjects
from ups.models.baselines import grid_model
from ups.models.codec import codec_from
from ups.models.weights import load_model


def score_baselines(
    folder: Path,
    cache: LatentCache,
    receipts: dict[str, dict[str, dict[str, Any]]],
    points: dict[str, Any],
    config: EvaluationConfig,
    device: str,
    raw: Path,
    data_root: Path,
) -> list[dict[str, Any]]:
    """Records of every kind of model on the test split of its family; `receipts` are by kind and family."""
    records = []
    subjects = held_out(cache, raw, "test")
    for kind, by_family in receipts.items():
        for family, receipt in by_family.items():
            emulator = grid_emulator(family, receipt, points, device, data_root)
            own = [subject for subject in subjects if subject.dataset.family == family]
            place = folder / kind
            place.mkdir(exist_ok=True)
            records += _named(kind, score_subjects(place, emulator, own, config, device))
    return records


def grid_emulator(
    family: str, receipt: dict[str, Any], points: dict[str, Any], device: str, data_root: Path
) -> Emulator:
    """A baseline of one family in the operator's place, or in that of the steady model."""
    codec = load_model(codec_from, data_root, points).to(device)
    model = load_model(grid_model, data_root, receipt).to(device)
    is_steady = FAMILIES[family].steady
    return Emulator(codec, None if is_steady else model, None, None, model if is_steady else None, {})


def _named(kind: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of the model itself, under its own name; codec and persistence are in the main evaluation."""
    return [record | {"method": kind} for record in records if record["method"] == plain_method(record["family"])]
