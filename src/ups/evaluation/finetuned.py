"""Operators beside each other on the same trajectories, each a method of its own."""

from pathlib import Path
from typing import Any

from ups.config import EvaluationConfig
from ups.evaluation.evaluate import Subject
from ups.evaluation.score import Trained, score_subjects


def score_operators(
    folder: Path, operators: dict[str, Trained], subjects: list[Subject], config: EvaluationConfig, device: str
) -> dict[str, Any]:
    """Records of each operator by the name of its method; arrays as for figures go into `folder/<method>`."""
    records = []
    for method, trained in operators.items():
        (folder / method).mkdir(exist_ok=True)
        scored = score_subjects(folder / method, trained.emulator(device), subjects, config, device)
        records += [record | {"method": method} for record in scored if record["method"] == "operator"]
    return {"records": records}
