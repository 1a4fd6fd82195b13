"""Nodes of pipeline `finetune`: one family from the multi-task operator, and what that brings."""

from pathlib import Path
from typing import Any

from rich import get_console

from ups.config import EvaluationConfig, FinetuneConfig, LaunchConfig
from ups.errors import ConfigFault
from ups.evaluation.table import score_table
from ups.fingerprint import fingerprint
from ups.launch import device, limit_threads, train_stage
from ups.receipts import Receipt, once


def train_finetune(
    latent_cache: Receipt, operator: Receipt, config: FinetuneConfig, launch: LaunchConfig, data_root: Path
) -> Receipt:
    """Go on training the operator on the datasets of one family."""
    if config.family not in latent_cache["transient"]:
        known = ", ".join(latent_cache["transient"]) or "none"
        raise ConfigFault(
            f"finetune.family = {config.family}: choose a family that the operator was trained on: {known}"
        )
    return train_stage("finetune", config, {"latent_cache": latent_cache, "operator": operator}, launch, data_root)


def score_finetuned(
    latent_cache: Receipt,
    codec: Receipt,
    operator: Receipt,
    finetune: Receipt,
    chosen: FinetuneConfig,
    config: EvaluationConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
) -> list[dict[str, Any]]:
    """Score the operator before and after on the family's test split."""
    from ups.evaluation.evaluate import held_out
    from ups.evaluation.finetuned import score_operators
    from ups.evaluation.score import Trained

    limit_threads(launch)
    operators = {
        method: Trained(latent_cache, {"codec": codec, "operator": trained}, data_root)
        for method, trained in {"operator": operator, "finetuned": finetune}.items()
    }
    cache = operators["operator"].cache()
    subjects = [subject for subject in held_out(cache, raw) if subject.dataset.family == chosen.family]
    inputs = {"latent_cache": latent_cache, "codec": codec, "operator": operator, "finetune": finetune}
    receipt = once(
        "score_finetuned",
        data_root / "07_model_output" / "finetune",
        fingerprint("ups.evaluation.finetuned", config, inputs),
        lambda folder: score_operators(folder, operators, subjects, config, device(launch)),
        root=data_root,
    )
    get_console().print(score_table(receipt["records"], "nRMSE", f"the test split of {chosen.family}"))
    return receipt["records"]
