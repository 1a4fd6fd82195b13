"""Pipelines `evaluation` (coverage of training, choice of the corrector, scores in physical units) and `protocol`."""

from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.pipeline import Pipeline

from ups.config import (
    CorrectorConfig,
    EvaluationConfig,
    JudgeConfig,
    LaunchConfig,
    ProtocolConfig,
    SelectionConfig,
    SubsampleConfig,
)
from ups.data.pdebench import FAMILIES
from ups.data.recognition import digests_of
from ups.data.sources import find_families, list_files
from ups.pipelines import STAGES, cached, on_ranks, on_raw_files, reporting, step
from ups.pipelines.reporting import pages_of, steady_by_family
from ups.runs.machine import compute_as_in_training, device, scoring_launch
from ups.runs.run import Run
from ups.runs.stage_cache import Receipt, trained_receipts

if TYPE_CHECKING:
    from ups.surrogate.trained import Trained

TRAINED = STAGES | {"latent_cache": "latent_cache"}
OF_CORRECTOR = TRAINED | {"config": "params:corrector"}
SURROGATE = TRAINED | {"corrector": "corrector"}
SELECTION = {"selection": "selection_if_any", "selection_config": "params:selection"}
WITHOUT_CORRECTOR = ("codec", "operator", "steady")
PLAIN = {name: TRAINED[name] for name in ("latent_cache", *WITHOUT_CORRECTOR)}


def create_pipeline() -> Pipeline:
    """Coverage, corrector and scores, then the steps of `reporting`."""
    steps = [
        step(measure_coverage, PLAIN | {"config": "params:evaluation"}, "coverage"),
        step(choose_corrector, OF_CORRECTOR, ["corrector", "corrector_report"], tags=["diffusion", "consistency"]),
        step(evaluate, SURROGATE | SELECTION | {"config": "params:evaluation"}, ["metrics", "rollouts"]),
        step(
            evaluate_external,
            SURROGATE | {"config": "params:evaluation", "subsample": "params:subsample", "limits": "params:judge"},
            ["external_metrics", "external_verdict", "external_table", "external_figures", "external_rollouts"],
        ),
    ]
    return Pipeline(steps, tags="evaluation") + reporting.create_pipeline()


def create_first_verdict() -> Pipeline:
    """The verdict on a few trajectories, for `train_diffusion`: a hopeless run stops before correctors are trained."""
    inputs = PLAIN | {"config": "params:evaluation", "limits": "params:judge"}
    return Pipeline([step(evaluate_few, inputs, "first_verdict")], tags="training")


def create_protocol() -> Pipeline:
    """Needs the models of `kedro run --pipeline full`."""
    inputs = PLAIN | {"config": "params:protocol"}
    return Pipeline([step(compare_by_protocol, inputs, ["protocol", "protocol_text"])], tags="protocol")


def trained_stages(inputs: dict[str, Receipt], launch: LaunchConfig, data_root: Path) -> "Trained":
    """The stages that were trained; torch in this process then uses as many threads as in a training process.

    `inputs` are the receipts of stages by name and that of the latent cache, `latent_cache`.
    """
    from ups.surrogate.trained import Trained

    compute_as_in_training(launch)
    stages = {name: receipt for name, receipt in inputs.items() if name != "latent_cache"}
    return Trained(inputs["latent_cache"], trained_receipts(stages), data_root)


def measure_coverage(
    latent_cache: Receipt, config: EvaluationConfig, launch: LaunchConfig, raw: Path, data_root: Path, **stages: Receipt
) -> Receipt:
    """Ranges and features of the training split by family, and the usual error: outside of them predictions warn."""
    from ups.evaluation.coverage import measure_coverage as measure

    inputs = {"latent_cache": latent_cache, **stages}
    trained = trained_stages(inputs, launch, data_root)
    config, module = config.scores_only, "ups.evaluation.coverage"
    measured = cached("measure_coverage", data_root, "06_models/coverage", module, config, inputs)
    work = on_raw_files(lambda folder: measure(folder, trained, config, launch, raw), latent_cache, raw, data_root)
    return measured(work) | {"models": trained.digests}


def evaluate_few(
    latent_cache: Receipt,
    config: EvaluationConfig,
    limits: JudgeConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
    **stages: Receipt,
) -> dict[str, Any]:
    """The verdict on the first test trajectories of each dataset, by the gates that can make it unusable."""
    from ups.evaluation.gates import UNUSABLE
    from ups.evaluation.gates import judge as judge_records

    count, place, config = limits.first_trajectories, "07_model_output/evaluate_few", config.scores_only
    trained = trained_stages({"latent_cache": latent_cache, **stages}, launch, data_root)
    inputs = {"latent_cache": latent_cache, **stages, "first_trajectories": count}
    scored = cached("evaluate_few", data_root, place, "ups.evaluation.parts", config, inputs)
    work = partial(score_test_split, trained=trained, config=config, launch=launch, raw=raw, num_trajectories=count)
    receipt = scored(on_raw_files(work, latent_cache, raw, data_root))
    gates = [gate for gate in limits.gates if gate.otherwise == UNUSABLE]
    return judge_records(receipt["records"], gates, steady_by_family(latent_cache))


def choose_corrector(
    latent_cache: Receipt,
    config: CorrectorConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
    **stages: Receipt,
) -> tuple[Receipt, dict[str, Any]]:
    """Choose on the validation split, per family and method, how residuals are added to predictions, if at all."""
    inputs = {"latent_cache": latent_cache, **stages}
    trained = trained_stages(inputs, launch, data_root)
    chosen = cached("choose_corrector", data_root, "06_models/corrector", "ups.evaluation.choice", config, inputs)
    work = partial(choose_on_valid_split, trained=trained, config=config, launch=launch, raw=raw)
    receipt = chosen(on_raw_files(work, latent_cache, raw, data_root))
    corrector = {key: receipt[key] for key in ("path", "fingerprint", "families")}
    return corrector | {"models": trained.digests}, receipt["report"]


def choose_on_valid_split(
    folder: Path, trained: "Trained", config: CorrectorConfig, launch: LaunchConfig, raw: Path
) -> Receipt:
    """The families' correctors and a report. The processes of this node share the families.

    Raises:
        Fault: from one of several processes, or LostWorker if one was killed or hung.
    """
    from ups.evaluation.choice import MODULE, choose, joined, path_of, validation_sets
    from ups.evaluation.parts import num_tokens
    from ups.evaluation.predictions import Compute

    sets = validation_sets(trained, raw)
    launch = scoring_launch(launch, num_tokens(chain(*sets.values())))
    if launch.num_processes == 1 or len(sets) == 1:
        compute = Compute.of(launch)
        return choose(folder, trained.surrogate(compute.device), sets, config, compute)
    run = _shared_run(folder, "choose_corrector", config.model_dump(mode="json"), trained, launch, raw)
    on_ranks(MODULE, run, {}, {path_of(folder, family): 1.0 for family in sets}, "families")
    return joined(folder, list(sets))


def evaluate(
    latent_cache: Receipt,
    config: EvaluationConfig,
    selection: dict[str, Any] | None,
    selection_config: SelectionConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
    **stages: Receipt,
) -> tuple[list[dict[str, Any]], Receipt]:
    """Score every method on the test split, in physical units, `selected` where `--pipeline selection` chose it."""
    from ups.evaluation.entries import with_digests
    from ups.evaluation.selected import valid_choices

    inputs = {"latent_cache": latent_cache, **stages}
    trained = trained_stages(inputs, launch, data_root)
    choices = valid_choices(selection, selection_config, inputs)
    inputs |= {"choices": choices} if choices else {}
    scored = cached("evaluate", data_root, "07_model_output/evaluate", "ups.evaluation.parts", config, inputs)
    work = partial(score_test_split, trained=trained, config=config, launch=launch, raw=raw, choices=choices)
    receipt = scored(on_raw_files(work, latent_cache, raw, data_root))
    records = with_digests(receipt["records"], trained.cache())
    rollouts = {key: receipt[key] for key in ("path", "fingerprint", "datasets")}
    return records, rollouts | {"models": trained.digests}


def score_test_split(
    folder: Path,
    trained: "Trained",
    config: EvaluationConfig,
    launch: LaunchConfig,
    raw: Path,
    num_trajectories: int | None = None,
    choices: dict[str, dict[str, Any]] | None = None,
) -> Receipt:
    """Records of the trained models on the test split; arrays for the figures are written into `folder`.

    Of each dataset the first `num_trajectories` are scored; None: all, with examples for the figures. The processes of
    this node share the work. Their number changes no record and no array, unless it changes threads or memory per
    process: then by rounding at most.

    Raises:
        Fault: from one of several processes, or LostWorker if one was killed or hung.
    """
    from ups.evaluation.parts import (
        MODULE,
        held_out_sets,
        joined,
        make_parts,
        num_tokens,
        path_of,
        score_sets,
    )
    from ups.evaluation.predictions import Compute

    chosen, examples = {"num_trajectories": num_trajectories, "choices": choices or {}}, num_trajectories is None
    sets = held_out_sets(trained, raw, **chosen)
    launch = scoring_launch(launch, num_tokens(sets))
    several = launch.num_processes > 1
    if several and len(parts := make_parts(trained.surrogate("cpu"), sets, config, launch.num_processes)) > 1:
        # `model_dump` leaves out what does not change the test scores
        run = _shared_run(folder, "evaluate", dict(config), trained, launch, raw)
        costs = {path_of(folder, part): part.cost for part in parts}
        on_ranks(MODULE, run, {"sets": chosen, "examples": examples}, costs, "parts")
        records = joined(folder, parts)
    else:
        compute = Compute.of(launch)
        records = score_sets(folder, trained.surrogate(compute.device), sets, config, compute, examples=examples)
    return {"records": records, "datasets": {each.dataset.name: each.dataset.family for each in sets}}


def _shared_run(
    folder: Path, step_name: str, section: dict[str, Any], trained: "Trained", launch: LaunchConfig, raw: Path
) -> Run:
    """A job in which the processes of this node use the trained stages."""
    inputs = {"latent_cache": trained.latent_cache, **trained.stages}
    # A single process does without torch's deterministic algorithms too.
    alike = launch.model_copy(update={"num_nodes": 1, "rendezvous": None, "deterministic": False})
    return Run(folder, step_name, "", section, inputs, alike, device(launch), trained.data_root, raw)


def evaluate_external(
    latent_cache: Receipt,
    config: EvaluationConfig,
    subsample: SubsampleConfig,
    limits: JudgeConfig,
    launch: LaunchConfig,
    data_root: Path,
    **stages: Receipt,
) -> tuple[list[dict[str, Any]], dict[str, Any], str, dict[str, bytes], Receipt]:
    """Score what `subsample` leaves of the files in `evaluation.folder`: records, verdict, table, figures and arrays.

    All are empty if no folder is named. Baselines and champion have no scores of these files.
    """
    if config.folder is None:
        return [], {}, "", {}, {}
    from ups.evaluation.external import external_sets, score_external
    from ups.evaluation.gates import judge as judge_records
    from ups.evaluation.tables import verdict_text

    if not config.folder_correctors:
        stages = {name: stages[name] for name in WITHOUT_CORRECTOR}
    inputs = {"latent_cache": latent_cache, **stages}
    folder, trained = Path(config.folder).resolve(), trained_stages(inputs, launch, data_root)
    families = find_families(folder, FAMILIES.defined)
    inputs["subsample"] = subsample.of(set(families.values()))
    inputs["files"] = list_files(folder, data_root / "01_raw" / "checksums.json")
    md5 = {name: entry["md5"] for name, entry in inputs["files"].items()}
    sets = external_sets(folder, md5, inputs["subsample"], trained)
    inputs["families"] = digests_of(families.values())
    module = "ups.evaluation.external"
    scored = cached("evaluate_external", data_root, "07_model_output/external", module, config, inputs)
    receipt = scored(lambda place: score_external(place, trained, sets, config, launch))
    records, families = receipt["records"], {each.dataset.family: FAMILIES[each.dataset.family].steady for each in sets}
    verdict = judge_records(records, limits.gates, families)
    rollouts = {key: receipt[key] for key in ("path", "fingerprint")}
    figures = pages_of("plot_external", rollouts, {each.dataset.name: each.dataset.family for each in sets}, data_root)
    rollouts |= {"datasets": {each.dataset.name: asdict(each.dataset) for each in sets}, "sources": inputs["files"]}
    return records, verdict, verdict_text(records, "nRMSE", f"all of {folder}", verdict), figures, rollouts


def compare_by_protocol(
    latent_cache: Receipt,
    config: ProtocolConfig,
    launch: LaunchConfig,
    raw: Path,
    data_root: Path,
    **stages: Receipt,
) -> tuple[list[dict[str, Any]], str]:
    """PDEBench's FNO and our models on the test split, both given PDEBench's initial snapshots, by its metrics."""
    from ups.evaluation.predictions import Compute
    from ups.evaluation.protocol import protocol_text, score_protocol
    from ups.evaluation.scores import held_out

    compute_as_in_training(launch)
    inputs = {"latent_cache": latent_cache, **stages}
    trained, where, records = trained_stages(inputs, launch, data_root), Compute.of(launch).device, []
    cache, surrogate = trained.cache(), trained.surrogate(where)
    for test in held_out(cache, raw):
        split, name = cache.datasets[test.dataset.name]["split"], test.dataset.name
        score = partial(score_protocol, surrogate, test, [*split["train"], *split["valid"]], config, where)
        work = on_raw_files(lambda _, score=score: {"records": score()}, latent_cache, raw, data_root)
        key, place = inputs | {"dataset": name}, f"07_model_output/protocol/{name}"
        records += cached("protocol", data_root, place, "ups.evaluation.protocol", config, key)(work)["records"]
    return records, protocol_text(records)
