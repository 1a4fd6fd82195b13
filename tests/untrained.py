"""Data roots as after training, with models of random weights."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import torch

from tests.data.conftest import write_file
from tests.training.jobs import inputs_of, launched, section
from ups.config import NONE_ADDED, WHOLE, LatentsConfig, SplitConfig
from ups.data.layouts import list_trajectories
from ups.data.pdebench import FAMILIES
from ups.files import WEIGHTS, digest_of, read_json, write_json
from ups.pipelines.data import describe_datasets, fit_normalization, list_folder
from ups.pipelines.training import encode_latents
from ups.runs.run import Run
from ups.runs.stage_cache import Receipt, trained_receipts, untrained_receipt
from ups.surrogate.trained import stage_digests
from ups.training.checkpoints import publish_tensors
from ups.training.stages import STAGES

STAGE_NAMES = ("codec", "operator", "steady", "diffusion", "consistency")


def make_root_of(root: Path, families: Iterable[str], count: int) -> Path:
    """Fill a data root with a small file of each family beside those that are there, and all stages."""
    (root / "01_raw").mkdir(exist_ok=True)
    for family in families:
        write_file(root / "01_raw", family, count=count)
    return make_root(root)


def make_root(root: Path, stages: tuple[str, ...] = STAGE_NAMES[1:]) -> Path:
    """Fill a data root, whose raw files are there, with datasets, a codec, latents and random weights of stages."""
    raw = root / "01_raw"
    files = list_folder("folder", raw, root)
    split = SplitConfig(seed=0, valid_fraction=0.3, test_fraction=0.4)
    write_json(root / "receipts/datasets.json", describe_datasets({}, {}, files, split, WHOLE, NONE_ADDED, raw, root))
    write_json(root / "receipts/normalization.json", fit_normalization(receipt(root, "datasets"), raw, root))
    make_stage(root, "codec")
    options = (LatentsConfig(tolerance=None, on_disk=True), launched(num_processes=1), raw, root)
    cache = encode_latents(receipt(root, "datasets"), receipt(root, "codec"), *options)
    write_json(root / "receipts/latent_cache.json", cache)
    for stage in STAGE_NAMES[1:]:
        write_json(root / f"receipts/{stage}.json", untrained_receipt(stage, "there is no suitable dataset"))
    for stage in stages:
        make_stage(root, stage)
    return root


def make_loadable(root: Path, families: Iterable[str], count: int) -> Path:
    """As `make_root_of`, with the receipts where `ups.load` expects those of a run."""
    make_root_of(root, families, count)
    for stage in STAGE_NAMES:
        write_json(root / f"06_models/{stage}.json", receipt(root, stage))
    write_json(root / "04_feature/latent_cache.json", receipt(root, "latent_cache"))
    return root


def make_corrector(root: Path, families: dict[str, dict[str, Any]]) -> None:
    """Write the corrections of families by method as those that were chosen for the models of a loadable data root."""
    stages = {stage: receipt(root, stage) for stage in STAGE_NAMES}
    models = stage_digests(trained_receipts(stages) | {"latent_cache": receipt(root, "latent_cache")})
    write_json(root / "06_models/corrector.json", {"families": families, "models": models})


def make_stage(root: Path, stage: str) -> None:
    """Write the weights, the run and the receipt of a stage that nobody trained."""
    config, build = section(stage), STAGES[stage].build
    inputs = inputs_of(root, stage)
    folder = root / "06_models" / stage / "0"
    run = Run(folder, stage, "", config.model_dump(mode="json"), inputs, launched(), "cpu", root, root / "01_raw")
    run.write()
    torch.manual_seed(list(STAGES).index(stage))
    made = build(config, run)
    for parameter in made.model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.1)
    publish_tensors(folder / WEIGHTS, {"settings": made.settings, "weights": made.model.state_dict()})
    place = {"path": str(folder.relative_to(root)), "weights": digest_of(folder / WEIGHTS)}
    write_json(root / f"receipts/{stage}.json", {"stage": stage, **place})


def receipt(root: Path, name: str) -> Receipt:
    """A receipt of the data root."""
    return read_json(root / f"receipts/{name}.json")


def copy_some(source: Path, target: Path, family: str, chosen: list[int]) -> None:
    """Write a file with some of the trajectories of another."""
    layout = FAMILIES[family].layout
    fields = {"tensor", "velocity", "particles", "force", *FAMILIES[family].fields, *FAMILIES[family].coefficients}
    fields |= {"t"} if layout == "batch" else set()
    with h5py.File(source) as old, h5py.File(target, "w") as new:
        new.attrs.update(old.attrs)
        keys = list_trajectories(old, FAMILIES[family])
        for name in [keys[index] for index in chosen] if layout == "groups" else old:
            if name in fields:
                new[name] = old[name][chosen]
            else:
                old.copy(name, new)
