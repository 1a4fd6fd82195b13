"""The pipelines by name.

They are listed because `find_pipelines` cannot provide sums such as `full`: with `--pipelines full` Kedro would look
for the folder `pipelines/full` alone.
"""

from kedro.pipeline import Pipeline

from ups.pipelines import baselines, data, evaluation, performance, studies, training


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
    full = sum(parts.values(), Pipeline([]))
    return {"__default__": full, "full": full, **parts, **others}
