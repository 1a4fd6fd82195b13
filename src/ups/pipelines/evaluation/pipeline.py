"""Pipeline `evaluation`: scores in physical units, figures, verdict, and the gate at the end."""

from kedro.pipeline import Pipeline, node

from ups.pipelines.evaluation.nodes import evaluate, judge, plot, require_pass

STAGES = ["codec_receipt", "operator_receipt", "diffusion_receipt", "consistency_receipt", "steady_receipt"]


def create_pipeline() -> Pipeline:
    """`require_pass` is last: a run that fails its gates leaves all its numbers behind."""
    return Pipeline(
        [
            node(
                evaluate,
                inputs=["latent_cache", *STAGES, "params:evaluation", "params:launch", "raw", "data_root"],
                outputs=["metrics", "rollouts"],
                name="evaluate",
            ),
            node(plot, inputs=["rollouts", "data_root"], outputs="figures", name="plot"),
            node(judge, inputs=["metrics", "latent_cache", "params:judge"], outputs="verdict", name="judge"),
            node(require_pass, inputs=["verdict", "metrics", "figures"], outputs=None, name="require_pass"),
        ]
    )
