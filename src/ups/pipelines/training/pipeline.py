"""Pipeline `training`: codec, latents, then operator and steady model, diffusion, consistency."""

from kedro.pipeline import Pipeline, node

from ups.pipelines.training.nodes import (
    encode_latents,
    train_codec,
    train_consistency,
    train_diffusion,
    train_operator,
    train_steady,
)


def create_pipeline() -> Pipeline:
    """Every stage is a torchrun child process, skipped where section, inputs and code are unchanged."""
    return Pipeline(
        [
            node(
                train_codec,
                inputs=["datasets", "normalization", "params:codec", "params:launch", "raw", "data_root"],
                outputs="codec_receipt",
                name="train_codec",
            ),
            node(
                encode_latents,
                inputs=["datasets", "codec_receipt", "params:latents", "params:launch", "raw", "data_root"],
                outputs="latent_cache",
                name="encode_latents",
            ),
            node(
                train_operator,
                inputs=["latent_cache", "params:operator", "params:launch", "data_root"],
                outputs="operator_receipt",
                name="train_operator",
            ),
            node(
                train_steady,
                inputs=["latent_cache", "params:steady", "params:launch", "data_root"],
                outputs="steady_receipt",
                name="train_steady",
            ),
            node(
                train_diffusion,
                inputs=[
                    "latent_cache",
                    "operator_receipt",
                    "steady_receipt",
                    "params:diffusion",
                    "params:launch",
                    "data_root",
                ],
                outputs="diffusion_receipt",
                name="train_diffusion",
            ),
            node(
                train_consistency,
                inputs=[
                    "latent_cache",
                    "operator_receipt",
                    "steady_receipt",
                    "diffusion_receipt",
                    "params:consistency",
                    "params:launch",
                    "data_root",
                ],
                outputs="consistency_receipt",
                name="train_consistency",
            ),
        ]
    )
