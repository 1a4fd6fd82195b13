"""Stage `codec`: learn the patch bases in which the first components say most."""

from dataclasses import asdict

from torch import Tensor, nn

from ups.config import CodecConfig, CodecModel
from ups.data.dataset import Dataset
from ups.data.loader import FieldBatch
from ups.data.pdebench import FAMILIES
from ups.data.samples import FieldSamples
from ups.models.codec import Codec, FieldGroup, choose_patch, group_name
from ups.run import Run
from ups.training.distributed import Draw
from ups.training.stage import Stage


def build(config: CodecConfig, run: Run) -> Stage:
    """Nested dropout: reconstruct each snapshot from its first k components, k drawn anew for each."""
    assert run.raw is not None
    datasets = {name: Dataset.from_json(entry) for name, entry in run.inputs["datasets"]["datasets"].items()}
    splits = run.inputs["datasets"]["splits"]
    groups = field_groups(config.model, datasets, run.inputs["normalization"]["statistics"])
    codec = Codec(groups)

    def loss(model: nn.Module, batch: FieldBatch, draw: Draw) -> Tensor:
        keep = draw.integers(groups[batch.group].components)
        u, u_pred = model(batch.u, batch.group, keep)
        return (u_pred - u).square().flatten(1).mean(1)

    return Stage(
        model=codec,
        settings={"groups": {name: asdict(group) for name, group in groups.items()}},
        loss=loss,
        train=FieldSamples(run.raw, datasets, splits, "train"),
        valid=FieldSamples(run.raw, datasets, splits, "valid"),
        num_tokens={name: group.num_tokens for name, group in groups.items()},
    )


def field_groups(model: CodecModel, datasets: dict[str, Dataset], statistics: dict) -> dict[str, FieldGroup]:
    """A group for the state of every family, and one for its coefficient fields where it has them."""
    groups: dict[str, FieldGroup] = {}
    first = 0
    for dataset in datasets.values():
        family, grid = FAMILIES[dataset.family], dataset.grid
        patch = choose_patch(grid, model.patch_size[len(grid) - 1], model.max_tokens[len(grid) - 1])
        for kind, names in (("fields", family.fields), ("coefficients", family.coefficients)):
            if names and group_name(family.name, kind) not in groups:
                fields = [statistics[family.name][kind][name] for name in names]
                groups[group_name(family.name, kind)] = FieldGroup(
                    grid=grid,
                    patch=patch,
                    components=min(patch ** len(grid), model.components),
                    log=tuple(field["log"] for field in fields),
                    mean=tuple(field["mean"] for field in fields),
                    std=tuple(field["std"] for field in fields),
                    first=first,
                )
                first += len(names)
    return groups
