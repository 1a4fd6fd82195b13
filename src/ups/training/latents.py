"""Encode all trajectories with a trained codec into the latent cache."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ups.config import LatentsConfig
from ups.data.dataset import Dataset
from ups.data.latent_cache import write_latents, write_manifest
from ups.data.pdebench import FAMILIES
from ups.models.codec import Codec, codec_from, group_name
from ups.models.weights import load_model
from ups.progress import ProgressBar

SNAPSHOTS_AT_ONCE = 16


def encode_datasets(
    folder: Path,
    datasets: dict[str, Any],
    codec_receipt: dict[str, Any],
    config: LatentsConfig,
    device: str,
    raw: Path,
    data_root: Path,
) -> dict[str, Any]:
    """Write or complete the cache in `folder`; its key names codec weights, normalization, source files and options."""
    codec = load_model(codec_from, data_root, codec_receipt).to(device)
    described = {name: Dataset.from_json(entry) for name, entry in datasets["datasets"].items()}
    total = sum(dataset.num_trajectories for dataset in described.values())

    with ProgressBar("encode_latents", total, "trajectories") as bar:
        write_latents(folder, raw, described, partial(_encode, codec, device), config.dtype, bar.advance)
    key = {
        "codec weights": codec_receipt["weights"],
        "normalization": {name: [group.log, group.mean, group.std] for name, group in codec.groups.items()},
        "source files": {name: file["md5"] for name, file in datasets["sources"].items()},
        "splits": datasets["fingerprint"],
        "options": config.model_dump(),
    }
    token_grids = {d.family: list(codec.groups[group_name(d.family, "fields")].token_grid) for d in described.values()}
    write_manifest(folder, key, described, datasets["splits"], token_grids)
    steady = {family: FAMILIES[family].steady for family in sorted(token_grids)}
    return {
        "key": key,
        "codec": codec_receipt,
        "steady": [family for family, is_steady in steady.items() if is_steady],
        "transient": [family for family, is_steady in steady.items() if not is_steady],
    }


@torch.no_grad()
def _encode(codec: Codec, device: str, u: np.ndarray, family: str, kind: str) -> np.ndarray:
    parts = torch.from_numpy(u).split(SNAPSHOTS_AT_ONCE)
    return torch.cat([codec.encode(part.to(device), group_name(family, kind)).cpu() for part in parts]).numpy()
