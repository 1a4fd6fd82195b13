"""Stage `codec`: linear bases of patches, components ordered by the variance that they explain; the identity codec."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from ups.config import CodecConfig
from ups.config.training import CodecModel
from ups.data.families import Dataset
from ups.data.pdebench import FAMILIES
from ups.data.samples import FieldBatch, FieldSamples
from ups.errors import ConfigFault
from ups.files import WEIGHTS, digest_of
from ups.models.codec import (
    Codec,
    FieldGroup,
    choose_patch,
    group_name,
    larger_patches,
    normalized_patches,
    principal_errors,
)
from ups.runs.run import Run
from ups.training.checkpoints import publish_tensors
from ups.training.distributed import Draw
from ups.training.stage import Stage

# Of a sample, at the same time: 7.3 to 9.0 in forward and backward pass (measured on 1D to 3D grids), 4 that are read.
COPIES = 12
# Snapshots whose patches' principal components are computed: so many, fewer of these that have many values.
RATE_SNAPSHOTS, RATE_VALUES = 128, 2**24


def build(config: CodecConfig, run: Run) -> Stage:
    """Nested dropout (Rippel et al. 2014, arXiv:1402.0915): reconstruct snapshots from their first k components.

    k is uniform in 1, ..., number of components for each sample, which orders the components as in a principal
    component analysis. The loss is the mean square error of the normalized fields, one value per sample (B,).
    """
    assert run.raw is not None
    datasets = {name: Dataset.from_json(entry) for name, entry in run.inputs["datasets"]["datasets"].items()}
    splits = run.inputs["datasets"]["splits"]
    groups = field_groups(config.model, run.inputs["datasets"], run.inputs["normalization"], run.inputs.get("rates"))
    settings = {"groups": {name: asdict(group) for name, group in groups.items()}}

    def loss(model: nn.Module, batch: FieldBatch, draw: Draw) -> Tensor:
        keep = draw.integers(groups[batch.group].components)
        patches, patches_pred = model(batch.u, batch.group, keep)
        return (patches_pred - patches).square().mean((0, 2, 3))

    train, valid = (FieldSamples(run.raw, datasets, splits, split, run.stamps) for split in ("train", "valid"))
    num_tokens = {name: group.num_tokens for name, group in groups.items()}
    sizes = {name: 4 * len(group.mean) * math.prod(group.grid) for name, group in groups.items()}
    sample_bytes = {name: COPIES * size for name, size in sizes.items()}
    return Stage(Codec(groups), settings, loss, train, valid, num_tokens, sample_bytes)


def field_groups(
    model: CodecModel, datasets: dict[str, Any], normalization: dict[str, Any], rates: dict[str, Any] | None
) -> dict[str, FieldGroup]:
    """A field group for the state of every family of the receipts, and one for its coefficient fields if it has any.

    Patches and components are those that `measure_rates` chose, or without it those of `model`.
    """
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
    return groups if rates is None else {name: replace(groups[name], **rates["chosen"][name]) for name in groups}


def measure_rates(
    model: CodecModel, datasets: dict[str, Any], normalization: dict[str, Any], raw: Path
) -> dict[str, Any]:
    """The patch and the numbers of components of every family with the fewest latents that keep `model.tolerance`.

    Patches have at most `model.components` points, or as few as `field_groups` gives them.

    Returns:
        - "chosen": {group: {"patch", "components"}};
        - "errors": {group: {patch: RMS error with 0, 1, ... components, of the field where it is largest}}, in units of
          the field's standard deviation, of principal components of the training split.

    Raises:
        ConfigFault: the tolerance needs more than `model.components` components.
    """
    described = {name: Dataset.from_json(entry) for name, entry in datasets["datasets"].items()}
    samples = FieldSamples(raw, described, datasets["splits"], "train")
    groups = field_groups(model, datasets, normalization, None)
    errors = {name: _errors_by_patch(samples, name, group, model.components) for name, group in groups.items()}
    chosen: dict[str, dict[str, int]] = {}
    for family in dict.fromkeys(name.split("/")[0] for name in groups):
        of_family = {name: group for name, group in groups.items() if name.split("/")[0] == family}
        chosen |= _with_fewest_latents(of_family, errors, model)
    return {"chosen": chosen, "errors": errors}


def _errors_by_patch(samples: FieldSamples, name: str, group: FieldGroup, max_points: int) -> dict[str, list[float]]:
    """The curves "errors" of one group; snapshots are spread evenly over the training split."""
    total, values = samples.num_samples[name], len(group.mean) * math.prod(group.grid)
    count = min(total, RATE_SNAPSHOTS, math.ceil(RATE_VALUES / values))
    moments: dict[int, Any] = dict.fromkeys(larger_patches(group.grid, group.patch, max_points), 0.0)
    for number in np.linspace(0, total - 1, count).round().astype(int):
        u = samples.load(name, np.array([number])).u
        for patch in moments:
            x = normalized_patches(u, replace(group, patch=patch)).flatten(1, 2).double()
            moments[patch] = moments[patch] + x.mT @ x / (x.shape[1] * count)
    return {str(patch): principal_errors(moment).amax(0).tolist() for patch, moment in moments.items()}


def _with_fewest_latents(
    groups: dict[str, FieldGroup], errors: dict[str, dict[str, list[float]]], model: CodecModel
) -> dict[str, dict[str, int]]:
    """Sizes as in "chosen" for the groups of one family, which have one patch."""
    found: dict[int, dict[str, dict[str, int]]] = {}
    for edge in errors[next(iter(groups))]:
        # The errors decrease, so that their number above the tolerance is the number of components to keep.
        needed = {name: max(1, int(np.sum(np.array(errors[name][edge]) > model.tolerance))) for name in groups}
        chosen = {name: {"patch": int(edge), "components": k} for name, k in needed.items()}
        sizes = [replace(groups[name], **chosen[name]) for name in groups]
        if max(needed.values()) <= model.components:
            found.setdefault(sum(size.num_tokens * size.num_channels for size in sizes), chosen)
    if not found:
        name, patch = next((name, group.patch) for name, group in groups.items())
        what = f"codec.model.tolerance = {model.tolerance:g} needs more than {model.components} components per field"
        raise ConfigFault(f"{name}, patch of {patch} points per axis: {what}: raise it or codec.model.components")
    return found[min(found)]


IDENTITY = CodecModel(  # no limit of tokens
    patch_size=(1, 1, 1), max_tokens=(2**62, 2**62, 2**62), components=1, tolerance=None
)


def write_identity_codec(folder: Path, datasets: dict[str, Any], normalization: dict[str, Any]) -> dict[str, Any]:
    """Write a codec with patches of one point into `folder`: latents are the normalized fields, nothing is trained.

    With it, models on the grid (the baselines) are trained from a latent cache by the same code as all others.
    """
    groups = field_groups(IDENTITY, datasets, normalization, None)
    settings = {"groups": {name: asdict(group) for name, group in groups.items()}}
    publish_tensors(folder / WEIGHTS, {"settings": settings, "weights": Codec(groups).state_dict()})
    return {"stage": "identity_codec", "weights": digest_of(folder / WEIGHTS)}
