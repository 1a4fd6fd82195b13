"""The pipelines by name.

They are listed because `find_pipelines` cannot provide sums such as `full`: with `--pipelines full` Kedro would look
for the folder `pipelines/full` alone.
"""

from collections.abc import Iterable
from typing import Any

from kedro.pipeline import Pipeline

from ups.pipelines import baselines, data, evaluation, performance, studies, training


class FoldedPipeline(Pipeline):
    """A pipeline in parts, each a namespace of its nodes, which Kedro-Viz shows as one box that can be opened.

    Kedro knows a node of a namespace as `training.train_operator` only; here `train_operator` is found as well, also in
    the sum of this pipeline and another one, which is what `kedro run` filters.
    """

    def __add__(self, other: Pipeline) -> "FoldedPipeline":
        return FoldedPipeline([self, other])

    def __radd__(self, other: Pipeline) -> "FoldedPipeline":
        return FoldedPipeline([other, self])

    def filter(
        self,
        tags: Iterable[str] | None = None,
        from_nodes: Iterable[str] | None = None,
        to_nodes: Iterable[str] | None = None,
        node_names: Iterable[str] | None = None,
        **others: Any,
    ) -> Pipeline:
        """The nodes that meet all conditions, named with or without their namespace."""
        whole = {node.short_name: node.name for node in self.nodes}
        chosen = {"from_nodes": from_nodes, "to_nodes": to_nodes, "node_names": node_names}
        names = {option: [whole.get(name, name) for name in given or []] or None for option, given in chosen.items()}
        return super().filter(tags=tags, **names, **others)


def register_pipelines() -> dict[str, Pipeline]:
    """`full` is `data`, `training` and `evaluation`; the others continue from its results or compare them."""
    parts = {
        "data": data.create_pipeline(),
        "training": training.create_pipeline(),
        "evaluation": evaluation.create_pipeline(),
    }
    others = {
        "baselines": baselines.create_pipeline(),
        "ablation": studies.create_ablation(),
        "finetune": studies.create_finetune(),
        "tune": performance.create_tune(),
        "profile": performance.create_profile(),
        "benchmark": performance.create_benchmark(),
        "selection": studies.create_selection(),
        "seeds": studies.create_seeds(),
    }
    full = FoldedPipeline(
        [Pipeline(part, namespace=name, prefix_datasets_with_namespace=False) for name, part in parts.items()]
    )
    return {"__default__": full, "full": full, **parts, **others}
