"""The choice of the corrector: for each family whether and how residuals are sampled, from its validation split."""

from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ups.config import CorrectorConfig
from ups.config.evaluation import StudentConfig
from ups.evaluation.candidates import Candidate, Validation
from ups.evaluation.scores import TrajectorySet, held_out
from ups.evaluation.tables import finite
from ups.runs.progress import ProgressBar
from ups.surrogate.surrogate import Correction
from ups.surrogate.trained import OFF, Trained

MARGIN = 1.25  # the error grows with the residual scale too, so that spread-skill grows by less than that factor


def choose(trained: Trained, config: CorrectorConfig, device: str, raw: Path) -> dict[str, Any]:
    """Choose a correction, or none, for every family and method.

    Returns:
        {"families": {family: {"diffusion", "consistency"}}, "report": {family: scores of all candidates}}.
    """
    surrogate = trained.surrogate(device)
    sets: dict[str, list[TrajectorySet]] = defaultdict(list)
    for each in held_out(trained.cache(), raw, "valid"):
        sets[each.dataset.family].append(each)
    families, report = {}, {}
    with ProgressBar("choose_corrector", len(sets), "families") as bar:
        for family, of_family in sorted(sets.items()):
            validation = Validation(surrogate, of_family, config, torch.device(device))
            families[family], report[family] = choose_for_family(validation)
            bar.advance(1)
    return {"families": families, "report": report}


def choose_for_family(validation: Validation) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice for each method, and a report; with too few trajectories both methods stay off.

    Corrections of the denoiser come first. The student is only tried where the denoiser's best one qualifies, because
    it was distilled from the denoiser and is compared with it.
    """
    choice: dict[str, Any] = {"diffusion": {"mode": OFF}, "consistency": {"mode": OFF}}
    report: dict[str, Any] = {"num_trajectories": validation.num_trajectories, "decision": choice}
    if validation.num_trajectories < validation.config.min_trajectories:
        return choice, report
    tried = try_diffusion(validation)
    teacher = min(tried, key=lambda candidate: candidate.rank)
    choice["diffusion"] = _correction_or_off(teacher)
    if teacher.qualifies and validation.surrogate.student is not None:
        students = try_consistency(validation, teacher)
        student = min(students, key=lambda candidate: _student_rank(candidate, teacher, validation.config.student))
        choice["consistency"] = _correction_or_off(student)
        report["accept"] = compare_with_teacher(validation, teacher, student)
        tried += students
    candidates = [finite(asdict(candidate)) for candidate in tried]
    return choice, report | {"plain": finite(validation.plain), "candidates": candidates}


def try_diffusion(validation: Validation) -> list[Candidate]:
    """Candidates of the denoiser, one option at a time.

    First every start, with independent noise and residual scale 1; then other noise correlations with the best start;
    then other residual scales with the best of all these.
    """
    config = validation.config
    modes = [("sample", config.sample), *(("refine", start) for start in config.refine)]
    starts = [Correction(mode, start.sigma, config.sigma_min, start.num_steps, 1.0, 0.0) for mode, start in modes]
    tried = [validation.candidate("diffusion", start) for start in starts]
    best = min(tried, key=lambda candidate: candidate.rank).correction
    others = [c for c in config.noise_correlations if c != best.noise_correlation]
    tried += [validation.candidate("diffusion", replace(best, noise_correlation=c)) for c in others]
    return tried + _with_residual_scales(validation, min(tried, key=lambda candidate: candidate.rank))


def try_consistency(validation: Validation, teacher: Candidate) -> list[Candidate]:
    """Candidates of the student in one and two evaluations, from the teacher's noise level."""
    tried = []
    for num_steps in validation.config.student.num_steps:
        correction = replace(teacher.correction, num_steps=num_steps, residual_scale=1.0)
        unscaled = validation.candidate("consistency", correction)
        tried += [unscaled, *_with_residual_scales(validation, unscaled)]
    return tried


def _with_residual_scales(validation: Validation, unscaled: Candidate) -> list[Candidate]:
    """The same correction with the residual scales that may calibrate it: its spread-skill about grows with them."""
    config = validation.config
    limit = MARGIN * config.max_miscalibration
    lowest, highest = unscaled.spread_skill
    fitting = [s for s in config.residual_scales if s != 1.0 and 1 / limit <= s * lowest and s * highest <= limit]
    corrections = [replace(unscaled.correction, residual_scale=scale) for scale in fitting]
    return [validation.candidate(unscaled.method, correction) for correction in corrections]


def _student_rank(student: Candidate, teacher: Candidate, limits: StudentConfig) -> tuple[bool, int, tuple]:
    """Sort key, best first: as good as the teacher, of these the fewest evaluations; then by rank."""
    is_as_good = (
        student.qualifies
        and student.worst_ratio_to(teacher, "nRMSE") <= limits.max_nrmse
        and student.worst_ratio_to(teacher, "CRPS") <= limits.max_crps
    )
    return not is_as_good, student.correction.num_steps * is_as_good, student.rank


def compare_with_teacher(validation: Validation, teacher: Candidate, student: Candidate) -> dict[str, Any]:
    """Ratios of errors, student over teacher, and of costs, teacher over student, and whether all limits hold."""
    limits = validation.config.student
    ratios = {
        "nRMSE": student.worst_ratio_to(teacher, "nRMSE"),
        "CRPS": student.worst_ratio_to(teacher, "CRPS"),
        "evaluations": teacher.correction.num_steps / student.correction.num_steps,
        "wall_time": validation.wall_time_ratio(teacher, student),
    }
    accepted = (
        ratios["nRMSE"] <= limits.max_nrmse
        and ratios["CRPS"] <= limits.max_crps
        and ratios["evaluations"] >= limits.min_evaluations_ratio
        and ratios["wall_time"] >= limits.min_wall_time_ratio
    )
    return finite(ratios) | {"num_steps": student.correction.num_steps, "accepted": accepted}


def _correction_or_off(candidate: Candidate) -> dict[str, Any]:
    return asdict(candidate.correction) if candidate.qualifies else {"mode": OFF}
