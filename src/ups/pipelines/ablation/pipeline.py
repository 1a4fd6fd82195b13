"""Pipeline `ablation`: the operator with one thing changed at a time, on the validation split."""

from kedro.pipeline import Pipeline, node

from ups.pipelines.ablation.nodes import compare_variants, measure_variants, score_variants, train_variants


def create_pipeline() -> Pipeline:
    """It needs the codec and the latents that `--pipeline training` makes, or `--to-nodes encode_latents`."""
    train = ["latent_cache", "params:operator", "params:ablation", "params:launch", "data_root"]
    return Pipeline(
        [
            node(train_variants, inputs=train, outputs="ablation_variants", name="train_variants"),
            node(measure_variants, inputs=train, outputs="ablation_pace", name="measure_variants"),
            node(
                score_variants,
                inputs=["ablation_variants", "latent_cache", "codec_receipt"]
                + ["params:evaluation", "params:launch", "raw", "data_root"],
                outputs="ablation_scores",
                name="score_variants",
            ),
            node(
                compare_variants,
                inputs=["ablation_scores", "ablation_pace"],
                outputs=["ablation", "ablation_text"],
                name="compare_variants",
            ),
        ]
    )
