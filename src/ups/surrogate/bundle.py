"""Trained models with their card: collected from a data root, written as a bundle folder, and read from one.

A bundle is `model.json` (the card), `weights.safetensors` and `README.md`. Reading one imports torch, numpy and
safetensors alone.
"""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ups import __version__
from ups.data.families import NUM_CONDITIONS, Family, base_of
from ups.data.pdebench import FAMILIES
from ups.errors import ConfigFault, DataFault
from ups.files import RUN, digest_of, place_of, publish, read_json, write_json
from ups.models.weights import load_settings
from ups.surrogate.surrogate import Correction, Surrogate
from ups.surrogate.trained import MODELS, PLAIN_STAGES, Trained, stage_digests, surrogate_of

log = logging.getLogger(__name__)

CARD, TENSORS, TEXT = "model.json", "weights.safetensors", "README.md"
FORMAT = 2  # of model.json
NOT_IN_SCORES = ("trajectories", "family")
REMEDY = "train the models with this version, then save the bundle again with `ups export` or `model.save`"


@dataclass(frozen=True)
class Bundle:
    """The models, and the card: plain values that say what they were trained on and how good they are.

    The card has `format`, `ups` (version), `settings` (constructor arguments of each stage), `corrections` and
    `families`: by name the `datasets` of training (each as `dataclasses.asdict(Dataset)`, with the `split`),
    `token_grid`, `periodic` axes, `scores` (records as in metrics.json, without single trajectories), `coverage` (of
    `ups.surrogate.coverage`, or None) and `definition` (of `ups.Family`).
    """

    surrogate: Surrogate
    card: dict[str, Any]


def from_data_root(root: Path, device: torch.device) -> Bundle:
    """The models that the last run trained below a data root.

    Scores, coverage and corrector of other models are left out, with a warning.

    Raises:
        DataFault: codec and latent cache are missing, no model is trained, or a file is damaged.
    """
    from ups.data.samples import domains

    FAMILIES.read(root)
    trained = _trained(root)
    cache, surrogate = trained.cache(), trained.surrogate(device)
    # Models that were not evaluated have no scores and do not warn.
    scored = _receipt_of(trained, root / "07_model_output" / "rollouts.json", "scores")
    scores = read_json(root / "08_reporting" / "metrics.json", list[dict[str, Any]]) if scored else []
    covered = _receipt_of(trained, root / "06_models" / "coverage.json", "coverage").get("families", {})
    families = {}
    for name, domain in domains(cache).items():
        if surrogate.model(name) is None:
            continue
        entries = [entry for entry in cache.datasets.values() if entry["dataset"]["family"] == name]
        families[name] = {
            "datasets": [entry["dataset"] | {"split": entry["split"]} for entry in entries],
            "token_grid": list(domain.grid),
            "periodic": list(domain.periodic),
            "scores": [_without_trajectories(score) for score in scores if score["family"] == name],
            "coverage": covered.get(name),
            "definition": FAMILIES[name].definition,
        }
    card = {
        "format": FORMAT,
        "ups": __version__,
        "settings": {stage: load_settings(root, trained.stages[stage]) for stage in MODELS if stage in trained.stages},
        "corrections": [[*key, asdict(correction)] for key, correction in surrogate.corrections.items()],
        "families": families,
    }
    return Bundle(surrogate, _checked(card, root))


def _checked(card: dict[str, Any], place: Path) -> dict[str, Any]:
    """The card, if its models take the condition features of this version."""
    sizes = [settings["sizes"]["num_conditions"] for settings in card["settings"].values() if "sizes" in settings]
    if any(size != NUM_CONDITIONS for size in sizes):
        what = f"take {sizes[0]} condition features, this version has {NUM_CONDITIONS}"
        raise DataFault(f"{place}: the models of ups {card['ups']} {what}: train again with `kedro run`")
    return card


def _trained(root: Path) -> Trained:
    receipts = {}
    for name in MODELS:
        path = root / "06_models" / f"{name}.json"
        if path.is_file() and "untrained" not in (receipt := read_json(path, dict[str, Any])):
            receipts[name] = receipt
    cache = root / "04_feature" / "latent_cache.json"
    if not cache.is_file() or "codec" not in receipts or not receipts.keys() & set(PLAIN_STAGES[1:]):
        raise DataFault(f"{root} holds no trained models: run `kedro run --pipeline full`, or name another folder")
    trained = Trained(read_json(cache, dict[str, Any]), receipts, root)
    if old := _stages_of_another_run(trained):
        what = f"{root} has a new codec, latent cache or model, with which {', '.join(old)} was not trained"
        raise DataFault(f"{what}: finish the run, `kedro run`, or repeat the former one")
    corrector = _receipt_of(trained, root / "06_models" / "corrector.json", "corrector")
    return replace(trained, stages=receipts | {"corrector": corrector}) if corrector else trained


def _receipt_of(trained: Trained, path: Path, what: str) -> dict[str, Any]:
    """The receipt of a step after training; empty if there is none or, with a warning, if it is of other models."""
    if not path.is_file():
        return {}
    receipt = read_json(path, dict[str, Any])
    if (models := receipt.get("models")) is not None and models.items() <= trained.digests.items():
        return receipt
    log.warning("%s: %s of other models, left out; `kedro run --pipeline evaluation` makes it anew", path, what)
    return {}


def _stages_of_another_run(trained: Trained) -> list[str]:
    """Stages that were not trained on the latents and with the models that are there: a run stopped in between."""
    known = trained.digests
    later = [stage for stage in MODELS if stage in trained.stages and stage != "codec"]
    if trained.latent_cache["codec"]["weights"] != known["codec"]:
        return later
    inputs = {stage: read_json(place_of(trained.data_root, trained.stages[stage]) / RUN)["inputs"] for stage in later}
    return [stage for stage in later if not stage_digests(inputs[stage]).items() <= known.items()]


def _without_trajectories(score: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in score.items() if key not in NOT_IN_SCORES}


def save(bundle: Bundle, folder: Path, text: str) -> None:
    """Write a bundle, whose README is `text`; `model.json` is written last and has the hashes of both.

    Raises:
        ConfigFault: the folder holds other files.
        StorageFault: the disk is full or read-only.
    """
    from safetensors.torch import save as as_bytes

    if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - {CARD, TENSORS, TEXT}):
        raise ConfigFault(f"{folder} is not an empty folder: choose a new one for the bundle")
    tensors = {
        f"{stage}/{name}": tensor.detach().cpu().contiguous()
        for stage, model in models_of(bundle.surrogate).items()
        for name, tensor in model.state_dict().items()
    }
    with publish(folder / TENSORS) as temporary:
        temporary.write_bytes(as_bytes(tensors))  # `save_file` would put another file in its place
    with publish(folder / TEXT) as temporary:
        temporary.write_text(text, encoding="utf-8")
    card = bundle.card | {"weights": digest_of(folder / TENSORS)}
    write_json(folder / CARD, card | {"sha256": _digest(card)})


def models_of(surrogate: Surrogate) -> dict[str, nn.Module]:
    """The trained models by stage."""
    models = (surrogate.codec, surrogate.operator, surrogate.denoiser, surrogate.student, surrogate.steady)
    stages = ("codec", "operator", "diffusion", "consistency", "steady")
    return {stage: model for stage, model in zip(stages, models, strict=True) if model is not None}


def read(folder: Path, device: torch.device) -> Bundle:
    """The bundle in a folder, on `device`.

    Raises:
        DataFault: a file is missing or damaged, or was written by a newer version.
    """
    card = _read_card(folder / CARD)
    tensors = _read_tensors(folder / TENSORS, card["weights"])
    models = {}
    try:
        definitions = [entry["definition"] for entry in card["families"].values()]
        FAMILIES.define(*(Family(**each | {"name": base_of(each["name"])}) for each in definitions))
        for stage, settings in card["settings"].items():
            model = MODELS[stage](**_tuples(settings))
            weights = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{stage}/")}
            model.load_state_dict({name.removeprefix(f"{stage}/"): tensor for name, tensor in weights.items()})
            models[stage] = model.requires_grad_(False).eval().to(device, torch.float32)
        chosen = {(method, family): Correction(**how) for method, family, how in card["corrections"]}
    except (TypeError, RuntimeError, ValueError, KeyError) as fault:
        raise DataFault(f"{folder} does not fit ups {__version__}, but ups {card['ups']}: {REMEDY}") from fault
    return Bundle(surrogate_of(models, chosen), _checked(card, folder))


def _read_card(path: Path) -> dict[str, Any]:
    card = read_json(path)
    needed = {"format", "ups", "settings", "corrections", "families", "weights"}
    if not isinstance(card, dict) or not needed <= card.keys():
        raise DataFault(f"{path} is not the card of a bundle: {REMEDY}")
    if card["format"] != FORMAT:
        raise DataFault(
            f"{path} has format {card['format']}, this version of ups reads {FORMAT}: install ups {card['ups']}"
        )
    if card.pop("sha256", None) != _digest(card):
        raise DataFault(f"{path} differs from the hash that it holds: copy the bundle again")
    return card


def _digest(card: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()


def _read_tensors(path: Path, expected: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    if not path.is_file() or digest_of(path) != expected:
        raise DataFault(f"{path} is missing or differs from the hash in {CARD}: copy the bundle again")
    return load_file(path)


def _tuples(value: Any) -> Any:
    """Plain values in which lists from JSON are tuples again."""
    if isinstance(value, dict):
        return {key: _tuples(entry) for key, entry in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
