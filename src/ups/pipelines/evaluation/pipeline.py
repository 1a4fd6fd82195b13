"""Pipeline `evaluation`: the corrector's mode, scores in physical units, figures, verdict, and the gate at the end."""

from kedro.pipeline import Pipeline, node

from ups.pipelines.evaluation.nodes import choose_corrector, evaluate, evaluate_external, judge, plot, require_pass

STAGES = {stage: f"{stage}_receipt" for stage in ("codec", "operator", "steady", "diffusion", "consistency")}
EMULATOR = STAGES | {"corrector": "corrector"}
WHERE = {"latent_cache": "latent_cache", "launch": "params:launch", "data_root": "data_root"}


def create_pipeline() -> Pipeline:
    """`require_pass` is last: a run that fails its gates leaves all its numbers behind."""
    return Pipeline(
        [
            node(
                choose_corrector,
                inputs=STAGES | WHERE | {"config": "params:corrector", "raw": "raw"},
                outputs=["corrector", "corrector_report"],
                name="choose_corrector",
            ),
            node(
                evaluate,
                inputs=EMULATOR | WHERE | {"config": "params:evaluation", "raw": "raw"},
                outputs=["metrics", "rollouts"],
                name="evaluate",
            ),
            node(
                evaluate_external,
                inputs=EMULATOR | WHERE | {"config": "params:evaluation", "external": "external"},
                outputs=None,
                name="evaluate_external",
            ),
            node(plot, inputs=["rollouts", "data_root"], outputs="figures", name="plot"),
            node(judge, inputs=["metrics", "latent_cache", "params:judge"], outputs="verdict", name="judge"),
            node(require_pass, inputs=["verdict", "metrics", "figures"], outputs=None, name="require_pass"),
        ]
    )
