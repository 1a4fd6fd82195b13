"""Pipeline `training`: codec, latents, then operator and steady model, diffusion, consistency."""

from pathlib import Path

from kedro.pipeline import Pipeline, node

from ups.config import (
    CodecConfig,
    ConsistencyConfig,
    DiffusionConfig,
    LatentsConfig,
    LaunchConfig,
    OperatorConfig,
    SteadyConfig,
)
from ups.config.training import TrainingSection
from ups.runs.launcher import train_stage
from ups.runs.machine import device, limit_threads
from ups.runs.progress import ProgressBar
from ups.runs.stage_cache import Receipt, cached_step, fingerprint, trained_receipts, untrained_receipt


def create_pipeline() -> Pipeline:
    """Every stage is trained by torchrun in processes of its own, unless section, inputs and code are unchanged."""
    operators = {"latent_cache": "latent_cache", "operator": "operator_receipt", "steady": "steady_receipt"}
    return Pipeline(
        [
            node(
                train_codec,
                inputs=["datasets", "normalization", "params:codec", "params:launch"]
                + ["params:raw_root", "params:data_root"],
                outputs="codec_receipt",
                name="train_codec",
                tags="codec",
            ),
            node(
                encode_latents,
                inputs=["datasets", "codec_receipt", "params:latents", "params:launch"]
                + ["params:raw_root", "params:data_root"],
                outputs="latent_cache",
                name="encode_latents",
                tags="latents",
            ),
            node(
                train_operator,
                inputs=stage_options("operator") | {"latent_cache": "latent_cache"},
                outputs="operator_receipt",
                name="train_operator",
                tags="operator",
            ),
            node(
                train_steady,
                inputs=stage_options("steady") | {"latent_cache": "latent_cache"},
                outputs="steady_receipt",
                name="train_steady",
                tags="steady",
            ),
            node(
                train_diffusion,
                inputs=stage_options("diffusion") | operators,
                outputs="diffusion_receipt",
                name="train_diffusion",
                tags="diffusion",
            ),
            node(
                train_consistency,
                inputs=stage_options("consistency") | operators | {"diffusion": "diffusion_receipt"},
                outputs="consistency_receipt",
                name="train_consistency",
                tags="consistency",
            ),
        ],
        tags="training",
    )


def stage_options(stage: str) -> dict[str, str]:
    """The parameters that every node of a stage takes."""
    return {"config": f"params:{stage}", "launch": "params:launch", "data_root": "params:data_root"}


def train_codec(
    datasets: Receipt, normalization: Receipt, config: CodecConfig, launch: LaunchConfig, raw: Path, data_root: Path
) -> Receipt:
    """Train the codec between fields and latents."""
    inputs = {"datasets": datasets, "normalization": normalization}
    return train_stage("codec", config, inputs, launch, data_root, raw)


def encode_latents(
    datasets: Receipt, codec: Receipt, config: LatentsConfig, launch: LaunchConfig, raw: Path, data_root: Path
) -> Receipt:
    """Encode every trajectory once; the later stages are trained on latents alone."""
    from ups.data.latent_cache import encode_datasets

    limit_threads(launch)
    key = fingerprint("ups.data.latent_cache", config, {"datasets": datasets, "codec": codec})
    num_trajectories = sum(sum(entry["counts"]) for entry in datasets["datasets"].values())

    def encode(folder: Path) -> Receipt:
        with ProgressBar("encode_latents", num_trajectories, "trajectories") as bar:
            return encode_datasets(
                folder,
                datasets,
                codec,
                dtype=config.dtype,
                device=device(launch),
                raw=raw,
                data_root=data_root,
                advance=bar.advance,
            )

    return cached_step("encode_latents", data_root / "04_feature" / "latents", key, encode, root=data_root)


def train_operator(config: OperatorConfig, launch: LaunchConfig, data_root: Path, **inputs: Receipt) -> Receipt:
    """Train the operator that advances a latent by one time step."""
    return _train("operator", config, launch, data_root, inputs)


def train_steady(config: SteadyConfig, launch: LaunchConfig, data_root: Path, **inputs: Receipt) -> Receipt:
    """Train the regression of steady solutions on coefficient fields."""
    return _train("steady", config, launch, data_root, inputs)


def train_diffusion(config: DiffusionConfig, launch: LaunchConfig, data_root: Path, **inputs: Receipt) -> Receipt:
    """Train the denoiser of the residuals (truth minus prediction of the trained operator or steady model)."""
    return _train("diffusion", config, launch, data_root, inputs)


def train_consistency(config: ConsistencyConfig, launch: LaunchConfig, data_root: Path, **inputs: Receipt) -> Receipt:
    """Distil the denoiser into a copy that samples in one or two steps."""
    return _train("consistency", config, launch, data_root, inputs)


def _train(
    stage: str, config: TrainingSection, launch: LaunchConfig, data_root: Path, inputs: dict[str, Receipt]
) -> Receipt:
    """Train a stage on the receipts of its inputs, if there are datasets of its families."""
    if reason := no_datasets(stage, inputs["latent_cache"]):
        return untrained_receipt(stage, reason)
    return train_stage(stage, config, trained_receipts(inputs), launch, data_root)


def no_datasets(stage: str, latent_cache: Receipt) -> str | None:
    """`transient` or `steady`, if the stage is trained on such families alone and the latent cache has none."""
    from ups.training.stages import STAGES  # imports torch, which must not slow the start of every command

    families = STAGES[stage].families
    return None if families == "all" or latent_cache[families] else families
