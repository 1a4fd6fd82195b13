"""The pipelines by name.

They are listed because `find_pipelines` cannot provide sums such as `full`: with `--pipelines full` Kedro would look
for the folder `pipelines/full` alone.
"""

from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from ups.pipelines import (
    adaptation,
    baselines,
    data,
    deployment,
    evaluation,
    performance,
    plan,
    studies,
    training,
)


class FoldedNode(Node):
    """A node of a namespace, which Kedro-Viz shows as one box; its name has no namespace, for `kedro run --nodes`.

    Kedro would name it `training.train_operator`. Kedro-Viz identifies a node by its text, without the namespace: this
    one must differ from the same node in the pipeline `training`, which is not folded.
    """

    @property
    def name(self) -> str:
        return self.short_name

    def __str__(self) -> str:
        return f"{self.namespace}: {super().__str__()}"


def folded(pipeline: Pipeline, namespace: str) -> Pipeline:
    """The same pipeline as a namespace; its datasets keep their names."""
    # Not `Pipeline(pipeline, namespace=...)`: it would make nodes of the class `Node`.
    return Pipeline(
        [
            FoldedNode(node.func, node._inputs, node._outputs, name=node.name, tags=node.tags, namespace=namespace)
            for node in pipeline.nodes
        ]
    )


def register_pipelines() -> dict[str, Pipeline]:
    """`full` is `data`, `training` and `evaluation`; the others continue from its results or compare them."""
    parts = {
        "data": data.create_pipeline() + plan.create_check(),
        "training": training.create_pipeline() + evaluation.create_first_verdict(),
        "evaluation": evaluation.create_pipeline(),
    }
    others = {
        "plan": plan.create_pipeline(),
        "predict": deployment.create_predict(),
        "baselines": baselines.create_pipeline(),
        "ablation": studies.create_ablation(),
        "compression": studies.create_compression(),
        "adapt": adaptation.create_pipeline(),
        "tune": performance.create_tune(),
        "profile": performance.create_profile(),
        "benchmark": performance.create_benchmark(),
        "selection": studies.create_selection(),
        "coverage": studies.create_coverage(),
        "protocol": evaluation.create_protocol(),
        "seeds": studies.create_seeds(),
        "leaderboard": studies.create_leaderboard(),
        "register": deployment.create_register(),
    }
    full = Pipeline([folded(part, name) for name, part in parts.items()])
    return {"__default__": full, "full": full, **parts, **others}
