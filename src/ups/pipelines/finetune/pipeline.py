"""Pipeline `finetune`: the trained operator goes on with one family, and is scored beside what it was."""

from kedro.pipeline import Pipeline, node

from ups.pipelines.finetune.nodes import score_finetuned, train_finetune

OPTIONS = ["params:finetune", "params:evaluation", "params:launch"]


def create_pipeline() -> Pipeline:
    """It needs the operator that `--pipeline training` makes."""
    return Pipeline(
        [
            node(
                train_finetune,
                inputs=["latent_cache", "operator_receipt", "params:finetune", "params:launch", "data_root"],
                outputs="finetune_receipt",
                name="train_finetune",
            ),
            node(
                score_finetuned,
                inputs=[
                    "latent_cache",
                    "codec_receipt",
                    "operator_receipt",
                    "finetune_receipt",
                    *OPTIONS,
                    "raw",
                    "data_root",
                ],
                outputs="finetune_metrics",
                name="score_finetuned",
            ),
        ]
    )
