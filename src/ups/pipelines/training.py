"""Pipeline `training`: codec, latents, then operator and steady model, diffusion, consistency."""

import logging
import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.pipeline import Pipeline

from ups.config import (
    CodecConfig,
    ConsistencyConfig,
    CorrectorConfig,
    DiffusionConfig,
    LatentsConfig,
    LaunchConfig,
    OperatorConfig,
    SteadyConfig,
)
from ups.config.training import TrainingSection
from ups.data.estimate import bytes_per_value, readable
from ups.data.plan import free_disk_bytes
from ups.data.sources import stamps_of, unchanged
from ups.errors import GateFailed, StorageFault
from ups.files import place_of, resolved
from ups.pipelines import cached, step
from ups.pipelines.reporting import some_of
from ups.runs.launcher import train_stage
from ups.runs.machine import compute_as_in_training, device
from ups.runs.progress import ProgressBar
from ups.runs.run import Run
from ups.runs.stage_cache import Receipt, trained_receipts, untrained_receipt
from ups.runs.torchrun import run_query

if TYPE_CHECKING:
    from ups.data.encoding import Encoding

log = logging.getLogger(__name__)


def create_pipeline() -> Pipeline:
    """Every stage is trained in processes of torchrun, unless its parameters, inputs and code are unchanged."""
    cache = {"latent_cache": "latent_cache"}
    operators = cache | {"operator": "operator_receipt", "steady": "steady_receipt"}
    correctors = operators | {"limits": "params:corrector"}
    denoiser = correctors | {"first_verdict": "first_verdict", "config": "params:diffusion"}
    student = correctors | {"diffusion": "diffusion_receipt", "config": "params:consistency"}
    steps = [
        step(train_codec, ["datasets", "normalization", "params:codec"], "codec_receipt", tags="codec"),
        step(encode_latents, ["datasets", "codec_receipt", "params:latents"], "latent_cache", tags="latents"),
        step(train_operator, cache | {"config": "params:operator"}, "operator_receipt", tags="operator"),
        step(train_steady, cache | {"config": "params:steady"}, "steady_receipt", tags="steady"),
        step(train_diffusion, denoiser, "diffusion_receipt", tags="diffusion"),
        step(train_consistency, student, "consistency_receipt", tags="consistency"),
    ]
    return Pipeline(steps, tags="training")


def train_codec(
    datasets: Receipt, normalization: Receipt, config: CodecConfig, launch: LaunchConfig, raw: Path, data_root: Path
) -> Receipt:
    """Train the codec between fields and latents; with a tolerance its sizes are chosen before."""
    inputs = {"datasets": datasets, "normalization": normalization}
    return train_stage("codec", config, inputs | codec_rates(config, inputs, raw, data_root), launch, data_root, raw)


def codec_rates(config: CodecConfig, inputs: dict[str, Receipt], raw: Path, data_root: Path) -> dict[str, Receipt]:
    """The input `rates` of a codec with a tolerance: curves of the training split, and the sizes chosen by them."""
    if config.model.tolerance is None:
        return {}
    module = "ups.training.stages.codec"
    measured = cached("measure_rates", data_root, "04_feature/rates", module, config.model, inputs)

    def measure(_: Path) -> Receipt:
        from ups.training.stages.codec import measure_rates  # imports torch

        with unchanged(raw, inputs["datasets"]["sources"], data_root):
            return measure_rates(config.model, inputs["datasets"], inputs["normalization"], raw)

    return {"rates": measured(measure)}


def encode_latents(
    datasets: Receipt, codec: Receipt, config: LatentsConfig, launch: LaunchConfig, raw: Path, data_root: Path
) -> Receipt:
    """Encode every trajectory once, on this node's processes; the later stages are trained on latents alone."""
    import torch

    from ups.data.latent_cache import LatentCache
    from ups.training import encoding
    from ups.training.distributed import Ranks
    from ups.training.inputs import encoder

    compute_as_in_training(launch)
    launch = launch.model_copy(update={"num_nodes": 1, "rendezvous": None})
    inputs, options = {"datasets": datasets, "codec": codec}, config.of(dataset_families(datasets))

    def encode(folder: Path) -> Receipt:
        where = device(launch)
        stamps = stamps_of(raw, datasets["sources"], data_root)
        run = Run(folder, "encode_latents", "", options, inputs, launch, where, data_root, raw, stamps)
        cache, model = encoding.prepare(run)
        encoding.check_store(cache, model, run)
        check_room(cache, options["tolerance"])
        with ProgressBar("encode_latents", len(cache.shards), "shards") as bar:
            if launch.num_processes > 1:
                run_query(encoding.MODULE, run, {}, lambda: bar.reach(encoding.count_shards(cache)))
            else:
                alone = Ranks(0, 1, torch.device(where))
                encoding.encode_share(cache, encoder(model, alone.device), run, alone, bar.advance)
        return encoding.finish(cache, model, run)

    key = inputs | {"options": options}
    encoded = cached("encode_latents", data_root, "04_feature/latents", "ups.training.encoding", None, key)
    receipt = encoded(encode)
    if config.on_disk:
        return receipt
    if LatentCache.open(place_of(data_root, receipt), receipt["key"]).raw == resolved(str(raw), data_root):
        return receipt
    log.info("encode_latents: the raw files are in %s now", raw)
    return encoded(encode, force=True)


def check_room(cache: "Encoding", tolerances: dict[str, float | None]) -> None:
    """Check that the latents that are not encoded yet fit onto the disk, beside those that former codecs have left.

    Raises:
        StorageFault: they do not.
    """
    if cache.on_disk:
        families = {name: dataset.family for name, dataset in cache.datasets.items()}
        sizes = {key: math.prod(layout.shape) for key, layout in cache.layouts.items()}
        needed = sum(size * bytes_per_value(tolerances[families[name]]) for (name, _), size in sizes.items())
        written = sum(path.stat().st_size for path in map(cache.path, cache.shards) if path.is_file())
        if (missing := needed - written) > (free := free_disk_bytes(cache.folder)):
            what = f"{cache.folder}: latents need {readable(missing)} more, {readable(free)} are free"
            raise StorageFault(f"{what}; delete older latents beside this folder, or use less data (section subsample)")


def dataset_families(datasets: Receipt) -> set[str]:
    """The families of the datasets in a receipt."""
    return {entry["family"] for entry in datasets["datasets"].values()}


def train_operator(config: OperatorConfig, launch: LaunchConfig, data_root: Path, **inputs: Receipt) -> Receipt:
    """Train the operator that advances a latent by one time step."""
    return _train("operator", config, launch, data_root, inputs)


def train_steady(config: SteadyConfig, launch: LaunchConfig, data_root: Path, **inputs: Receipt) -> Receipt:
    """Train the regression of steady solutions on coefficient fields."""
    return _train("steady", config, launch, data_root, inputs)


def train_diffusion(
    config: DiffusionConfig,
    limits: CorrectorConfig,
    first_verdict: dict[str, Any],
    launch: LaunchConfig,
    data_root: Path,
    **inputs: Receipt,
) -> Receipt:
    """Train the denoiser of the residuals (truth minus prediction of the trained operator or steady model).

    Raises:
        GateFailed: the verdict on a few trajectories leaves no hope for that on all.
    """
    from ups.evaluation.gates import why_hopeless

    if reasons := why_hopeless(first_verdict):
        raise GateFailed(f"stopped after a few trajectories: {some_of(reasons)}; see first_verdict.json")
    return _train_corrector("diffusion", config, limits, launch, data_root, inputs)


def train_consistency(
    config: ConsistencyConfig, limits: CorrectorConfig, launch: LaunchConfig, data_root: Path, **inputs: Receipt
) -> Receipt:
    """Distil the denoiser into a copy that samples in one or two steps."""
    return _train_corrector("consistency", config, limits, launch, data_root, inputs)


def _train_corrector(
    stage: str,
    config: DiffusionConfig | ConsistencyConfig,
    limits: CorrectorConfig,
    launch: LaunchConfig,
    data_root: Path,
    inputs: dict[str, Receipt],
) -> Receipt:
    """Train a stage on the families for which `choose_corrector` may use it, with their part of the configured steps.

    Those with too few validation trajectories are left out of the lists of families in the receipt of the latent cache,
    and named in its `too_few_validation_trajectories`: the run folder keeps it.
    """
    cache = inputs["latent_cache"]
    few = few_validation_trajectories(cache, limits.min_trajectories, data_root)
    kept = {kind: [family for family in cache[kind] if family not in few] for kind in ("transient", "steady")}
    num_kept = sum(map(len, kept.values()))
    if few:
        named = ", ".join(f"{family} ({count})" for family, count in sorted(few.items()))
        log.info("%s: fewer than %d validation trajectories, not trained: %s", stage, limits.min_trajectories, named)
    if not num_kept:
        return untrained_receipt(
            stage, f"every family has fewer than {limits.min_trajectories} validation trajectories"
        )
    share = num_kept / (num_kept + len(few))
    fewer = {name: math.ceil(share * getattr(config, name)) for name in ("steps", "warmup_steps")}
    inputs = inputs | {"latent_cache": cache | kept | {"too_few_validation_trajectories": few}}
    return _train(stage, config.model_copy(update=fewer), launch, data_root, inputs)


def few_validation_trajectories(latent_cache: Receipt, min_trajectories: int, data_root: Path) -> dict[str, int]:
    """Number of validation trajectories of the families that have fewer than `min_trajectories`."""
    from ups.data.latent_cache import LatentCache  # imports torch, as below

    counts: Counter[str] = Counter()
    for entry in LatentCache.open(place_of(data_root, latent_cache), latent_cache["key"]).datasets.values():
        counts[entry["dataset"]["family"]] += len(entry["split"]["valid"])
    return {family: count for family, count in counts.items() if count < min_trajectories}


def _train(
    stage: str, config: TrainingSection, launch: LaunchConfig, data_root: Path, inputs: dict[str, Receipt]
) -> Receipt:
    """Train a stage on the receipts of its inputs, if there are datasets of its families."""
    if kind := no_datasets(stage, inputs["latent_cache"]):
        return untrained_receipt(stage, f"there is no {kind} dataset")
    return train_stage(stage, config, trained_receipts(inputs), launch, data_root)


def no_datasets(stage: str, latent_cache: Receipt) -> str | None:
    """`transient` or `steady`, if the stage is trained on such families alone and the latent cache has none."""
    from ups.training.stages import STAGES  # imports torch, which must not slow the start of every command

    families = STAGES[stage].families
    return None if families == "all" or latent_cache[families] else families
