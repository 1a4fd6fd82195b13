"""Stage `codec`: linear bases of patches, components ordered by the variance that they explain; the identity codec."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ups.config import CodecConfig
from ups.config.training import CodecModel
from ups.data.families import Dataset
from ups.data.pdebench import FAMILIES
from ups.data.samples import FieldBatch, FieldSamples
from ups.files import WEIGHTS, digest_of
from ups.models.codec import Codec, FieldGroup, choose_patch, group_name
from ups.runs.run import Run
from ups.training.checkpoints import publish_tensors
from ups.training.distributed import Draw
from ups.training.stage import Stage

# Of a sample, at the same time: 7.3 to 9.0 in forward and backward pass (measured on 1D to 3D grids), 4 that are read.
COPIES = 12


def build(config: CodecConfig, run: Run) -> Stage:
    """Nested dropout (Rippel et al. 2014, arXiv:1402.0915): reconstruct snapshots from their first k components.

    k is uniform in 1, ..., number of components for each sample, which orders the components as in a principal
    component analysis. The loss is the mean square error of the normalized fields, one value per sample (B,).
    """
    assert run.raw is not None
    datasets = {name: Dataset.from_json(entry) for name, entry in run.inputs["datasets"]["datasets"].items()}
    splits = run.inputs["datasets"]["splits"]
    groups = field_groups(config.model, run.inputs["datasets"], run.inputs["normalization"])
    settings = {"groups": {name: asdict(group) for name, group in groups.items()}}

    def loss(model: nn.Module, batch: FieldBatch, draw: Draw) -> Tensor:
        keep = draw.integers(groups[batch.group].components)
        patches, patches_pred = model(batch.u, batch.group, keep)
        return (patches_pred - patches).square().mean((0, 2, 3))

    train, valid = (FieldSamples(run.raw, datasets, splits, split) for split in ("train", "valid"))
    num_tokens = {name: group.num_tokens for name, group in groups.items()}
    sizes = {name: 4 * len(group.mean) * math.prod(group.grid) for name, group in groups.items()}
    sample_bytes = {name: COPIES * size for name, size in sizes.items()}
    return Stage(Codec(groups), settings, loss, train, valid, num_tokens, sample_bytes)


def field_groups(model: CodecModel, datasets: dict[str, Any], normalization: dict[str, Any]) -> dict[str, FieldGroup]:
    """A field group for the state of every family of the receipts, and one for its coefficient fields if it has any."""
    groups: dict[str, FieldGroup] = {}
    for dataset in map(Dataset.from_json, datasets["datasets"].values()):
        family, grid = FAMILIES[dataset.family], dataset.grid
        patch = choose_patch(grid, model.patch_size[len(grid) - 1], model.max_tokens[len(grid) - 1])
        components = min(patch ** len(grid), model.components)
        for kind, names in (("fields", family.fields), ("coefficients", family.coefficients)):
            group = group_name(family.name, kind)
            if names and group not in groups:
                fields = [normalization["statistics"][family.name][kind][name] for name in names]
                log, mean, std = (tuple(field[key] for field in fields) for key in ("log", "mean", "std"))
                groups[group] = FieldGroup(grid, patch, components, log, mean, std)
    return groups


IDENTITY = CodecModel(patch_size=(1, 1, 1), max_tokens=(2**62, 2**62, 2**62), components=1)  # no limit of tokens


def write_identity_codec(folder: Path, datasets: dict[str, Any], normalization: dict[str, Any]) -> dict[str, Any]:
    """Write a codec with patches of one point into `folder`: latents are the normalized fields, nothing is trained.

    With it, models on the grid (the baselines) are trained from a latent cache by the same code as all others.
    """
    groups = field_groups(IDENTITY, datasets, normalization)
    settings = {"groups": {name: asdict(group) for name, group in groups.items()}}
    publish_tensors(folder / WEIGHTS, {"settings": settings, "weights": Codec(groups).state_dict()})
    return {"stage": "identity_codec", "weights": digest_of(folder / WEIGHTS)}
