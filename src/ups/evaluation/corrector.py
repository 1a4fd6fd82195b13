"""Whether and how residuals are drawn for each family, decided on its validation trajectories."""

import math
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ups.config import CorrectorConfig, StudentConfig
from ups.emulator import Correction
from ups.evaluation import OFF
from ups.evaluation.candidates import Candidate, Validation
from ups.evaluation.evaluate import Subject, held_out
from ups.evaluation.score import Trained
from ups.progress import ProgressBar

MARGIN = 1.25  # errors grow with the spread too, so that spread-skill grows less


def choose(trained: Trained, config: CorrectorConfig, device: str, raw: Path) -> dict[str, Any]:
    """Decide for every family; a method of one is a correction or off.

    Returns:
        {"families": {family: {"diffusion", "consistency"}}, "report": {family: what was tried}}.
    """
    emulator = trained.emulator(device)
    subjects: dict[str, list[Subject]] = defaultdict(list)
    for subject in held_out(trained.cache(), raw, "valid"):
        subjects[subject.dataset.family].append(subject)
    families, report = {}, {}
    with ProgressBar("choose_corrector", len(subjects), "families") as bar:
        for family, chosen in sorted(subjects.items()):
            validation = Validation(emulator, chosen, config, torch.device(device))
            families[family], report[family] = choose_for_family(validation)
            bar.advance(1)
    return {"families": families, "report": report}


def choose_for_family(validation: Validation) -> tuple[dict[str, Any], dict[str, Any]]:
    """The decision for each method, and the scores of all that was tried; too few trajectories decide nothing."""
    decision: dict[str, Any] = {"diffusion": {"mode": OFF}, "consistency": {"mode": OFF}}
    report: dict[str, Any] = {"num_trajectories": validation.num_trajectories, "decision": decision}
    if validation.num_trajectories < validation.config.min_trajectories:
        return decision, report
    tried = try_diffusion(validation)
    teacher = min(tried, key=lambda candidate: candidate.rank)
    decision["diffusion"] = _decision(teacher)
    if teacher.qualifies and validation.emulator.student is not None:
        students = try_consistency(validation, teacher)
        student = min(students, key=lambda one: _preference(one, teacher, validation.config.student))
        decision["consistency"], report["accept"] = _decision(student), accept(validation, teacher, student)
        tried += students
    candidates = [_finite(asdict(candidate)) for candidate in tried]
    return decision, report | {"plain": _finite(validation.plain), "candidates": candidates}


def try_diffusion(validation: Validation) -> list[Candidate]:
    """Every start with fresh noise and spread 1; the other memories of the best of them; of that, spreads that fit."""
    config = validation.config
    modes = [("sample", config.sample), *(("refine", start) for start in config.refine)]
    starts = [Correction(mode, start.sigma, config.sigma_min, start.num_steps, 1.0, 0.0) for mode, start in modes]
    tried = [validation.candidate("diffusion", start) for start in starts]
    best = min(tried, key=lambda candidate: candidate.rank).correction
    others = [memory for memory in config.memories if memory != best.memory]
    tried += [validation.candidate("diffusion", replace(best, memory=memory)) for memory in others]
    return tried + _with_spreads(validation, min(tried, key=lambda candidate: candidate.rank))


def try_consistency(validation: Validation, teacher: Candidate) -> list[Candidate]:
    """One and two evaluations from where the teacher starts, with spread 1 and spreads that fit."""
    tried = []
    for num_steps in validation.config.student.num_steps:
        correction = replace(teacher.correction, num_steps=num_steps, spread=1.0)
        plain = validation.candidate("consistency", correction)
        tried += [plain, *_with_spreads(validation, plain)]
    return tried


def _with_spreads(validation: Validation, plain: Candidate) -> list[Candidate]:
    """The same with the spreads that may bring its spread-skill, which about grows with them, within the limits."""
    config = validation.config
    limit = MARGIN * config.max_miscalibration
    lowest, highest = plain.spread_skill
    fitting = [s for s in config.spreads if s != 1.0 and 1 / limit <= s * lowest and s * highest <= limit]
    return [validation.candidate(plain.method, replace(plain.correction, spread=s)) for s in fitting]


def _preference(student: Candidate, teacher: Candidate, limits: StudentConfig) -> tuple[bool, int, tuple]:
    """Smaller is better: those that qualify and are as good as the teacher, of these the cheapest; then by rank."""
    is_as_good = (
        student.qualifies
        and student.worst_over(teacher, "nRMSE") <= limits.max_nrmse
        and student.worst_over(teacher, "CRPS") <= limits.max_crps
    )
    return not is_as_good, student.correction.num_steps * is_as_good, student.rank


def accept(validation: Validation, teacher: Candidate, student: Candidate) -> dict[str, Any]:
    """What the student gains over the teacher, and whether that is what is asked of it."""
    limits = validation.config.student
    evaluations = teacher.correction.num_steps / student.correction.num_steps
    found = {
        "nRMSE": student.worst_over(teacher, "nRMSE"),
        "CRPS": student.worst_over(teacher, "CRPS"),
        "evaluations": evaluations,
        "wall_time": validation.wall_time_ratio(teacher, student),
    }
    accepted = (
        found["nRMSE"] <= limits.max_nrmse
        and found["CRPS"] <= limits.max_crps
        and found["evaluations"] >= limits.min_evaluations
        and found["wall_time"] >= limits.min_wall_time
    )
    return _finite(found) | {"num_steps": student.correction.num_steps, "accepted": accepted}


def _decision(candidate: Candidate) -> dict[str, Any]:
    return asdict(candidate.correction) if candidate.qualifies else {"mode": OFF}


def _finite(content: Any) -> Any:
    """The same with None for numbers that JSON cannot hold."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    return None if isinstance(content, float) and not math.isfinite(content) else content
