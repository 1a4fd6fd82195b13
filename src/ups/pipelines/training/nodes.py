"""Nodes of pipeline `training`: the codec, its latents, and the four stages that learn on them."""

from pathlib import Path

from ups.config import (
    CodecConfig,
    ConsistencyConfig,
    DiffusionConfig,
    LatentsConfig,
    LaunchConfig,
    OperatorConfig,
    SteadyConfig,
)
from ups.fingerprint import fingerprint
from ups.launch import device, limit_threads, train_stage
from ups.receipts import Receipt, once, only_trained, untrained


def train_codec(
    datasets: Receipt, normalization: Receipt, config: CodecConfig, launch: LaunchConfig, raw: Path, data_root: Path
) -> Receipt:
    """Train the codec between fields and latents."""
    inputs = {"datasets": datasets, "normalization": normalization}
    return train_stage("codec", config, inputs, launch, data_root, raw)


def encode_latents(
    datasets: Receipt, codec: Receipt, config: LatentsConfig, launch: LaunchConfig, raw: Path, data_root: Path
) -> Receipt:
    """Encode every trajectory once; the later stages never see fields."""
    from ups.training.latents import encode_datasets

    limit_threads(launch)
    identity = fingerprint("ups.training.latents", config, {"datasets": datasets, "codec": codec})
    return once(
        "encode_latents",
        data_root / "04_feature" / "latents",
        identity,
        lambda folder: encode_datasets(folder, datasets, codec, config, device(launch), raw, data_root),
        root=data_root,
    )


def train_operator(latent_cache: Receipt, config: OperatorConfig, launch: LaunchConfig, data_root: Path) -> Receipt:
    """Train the operator that advances a latent by one time step."""
    if not latent_cache["transient"]:
        return untrained("operator", "transient")
    return train_stage("operator", config, {"latent_cache": latent_cache}, launch, data_root)


def train_diffusion(
    latent_cache: Receipt,
    operator: Receipt,
    steady: Receipt,
    config: DiffusionConfig,
    launch: LaunchConfig,
    data_root: Path,
) -> Receipt:
    """Train the denoiser of what the trained operator and the trained steady model miss."""
    inputs = only_trained({"latent_cache": latent_cache, "operator": operator, "steady": steady})
    return train_stage("diffusion", config, inputs, launch, data_root)


def train_consistency(
    latent_cache: Receipt,
    operator: Receipt,
    steady: Receipt,
    diffusion: Receipt,
    config: ConsistencyConfig,
    launch: LaunchConfig,
    data_root: Path,
) -> Receipt:
    """Tune a copy of the denoiser to sample in one or two steps."""
    inputs = only_trained(
        {"latent_cache": latent_cache, "operator": operator, "steady": steady, "diffusion": diffusion}
    )
    return train_stage("consistency", config, inputs, launch, data_root)


def train_steady(latent_cache: Receipt, config: SteadyConfig, launch: LaunchConfig, data_root: Path) -> Receipt:
    """Train the regression of steady solutions on coefficient fields."""
    if not latent_cache["steady"]:
        return untrained("steady", "steady")
    return train_stage("steady", config, {"latent_cache": latent_cache}, launch, data_root)
