"""The codec that changes nothing: latents are normalized fields, one token per grid point, for models on the grid."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ups.config import CodecModel
from ups.data.dataset import Dataset
from ups.files import WEIGHTS, digest_of
from ups.models.codec import Codec
from ups.training.checkpoints import publish_tensors
from ups.training.codec import field_groups

UNLIMITED = 2**62
POINTS = CodecModel(patch_size=(1, 1, 1), max_tokens=(UNLIMITED, UNLIMITED, UNLIMITED), components=1)


def write_point_codec(folder: Path, datasets: dict[str, Any], normalization: dict[str, Any]) -> dict[str, Any]:
    """Write a codec whose patches are single points into `folder`; it needs no training."""
    described = {name: Dataset.from_json(entry) for name, entry in datasets["datasets"].items()}
    groups = field_groups(POINTS, described, normalization["statistics"])
    settings = {"groups": {name: asdict(group) for name, group in groups.items()}}
    publish_tensors(folder / WEIGHTS, {"settings": settings, "weights": Codec(groups).state_dict()})
    return {"stage": "points", "weights": digest_of(folder / WEIGHTS)}
