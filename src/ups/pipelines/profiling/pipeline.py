"""Pipeline `profile`: some steps of the operator under torch.profiler."""

from kedro.pipeline import Pipeline, node

from ups.pipelines.profiling.nodes import profile_operator


def create_pipeline() -> Pipeline:
    """It needs the latents that `--pipeline training` makes, or `--to-nodes encode_latents`."""
    return Pipeline(
        [
            node(
                profile_operator,
                inputs=["latent_cache", "params:operator", "params:profile", "params:launch", "data_root"],
                outputs=["profile_trace", "profile_text", "profile_figures"],
                name="profile_operator",
            )
        ]
    )
