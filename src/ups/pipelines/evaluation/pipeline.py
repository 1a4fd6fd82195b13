"""Pipeline `evaluation`: the corrector's mode, scores in physical units, figures, verdict, and the gate at the end."""

from kedro.pipeline import Pipeline, node

from ups.pipelines.evaluation.nodes import choose_corrector, evaluate, evaluate_external, judge, plot, require_pass

STAGES = ["codec_receipt", "operator_receipt", "diffusion_receipt", "consistency_receipt", "steady_receipt"]


def create_pipeline() -> Pipeline:
    """`require_pass` is last: a run that fails its gates leaves all its numbers behind."""
    return Pipeline(
        [
            node(
                choose_corrector,
                inputs=["latent_cache", *STAGES[:-1], "params:corrector", "params:launch", "raw", "data_root"],
                outputs=["corrector", "corrector_report"],
                name="choose_corrector",
            ),
            node(
                evaluate,
                inputs=["latent_cache", *STAGES, "corrector", "params:evaluation", "params:launch", "raw", "data_root"],
                outputs=["metrics", "rollouts"],
                name="evaluate",
            ),
            node(
                evaluate_external,
                inputs=[
                    "latent_cache",
                    *STAGES,
                    "corrector",
                    "params:evaluation",
                    "params:launch",
                    "external",
                    "data_root",
                ],
                outputs=None,
                name="evaluate_external",
            ),
            node(plot, inputs=["rollouts", "data_root"], outputs="figures", name="plot"),
            node(judge, inputs=["metrics", "latent_cache", "params:judge"], outputs="verdict", name="judge"),
            node(require_pass, inputs=["verdict", "metrics", "figures"], outputs=None, name="require_pass"),
        ]
    )
