"""Pipeline `tune`: for each stage whose inputs are there, the largest micro-batch that fits into memory."""

from kedro.pipeline import Pipeline, node

from ups.pipelines.tuning.nodes import tune_codec, tune_consistency, tune_diffusion, tune_operator, tune_steady

CACHE = "latent_cache_if_any"
OPERATOR, STEADY, DIFFUSION = (f"{stage}_receipt_if_any" for stage in ("operator", "steady", "diffusion"))


def create_pipeline() -> Pipeline:
    """Run `--pipeline data` before it, and `--pipeline training` for what learns from other stages."""
    nodes = {
        tune_codec: ["datasets", "normalization", "params:codec", "params:launch", "raw", "data_root"],
        tune_operator: [CACHE, "params:operator", "params:launch", "data_root"],
        tune_diffusion: [CACHE, OPERATOR, STEADY, "params:diffusion", "params:launch", "data_root"],
        tune_consistency: [CACHE, OPERATOR, STEADY, DIFFUSION, "params:consistency", "params:launch", "data_root"],
        tune_steady: [CACHE, "params:steady", "params:launch", "data_root"],
    }
    return Pipeline(
        [
            node(tune, inputs=inputs, outputs=f"{tune.__name__.removeprefix('tune_')}_micro_batch", name=tune.__name__)
            for tune, inputs in nodes.items()
        ]
    )
