"""The pipelines by name; explicit, because composed names must work with every way of asking for them."""

from kedro.pipeline import Pipeline

from ups.pipelines import data, evaluation, training


def register_pipelines() -> dict[str, Pipeline]:
    """`full` is the whole house, the others are its rooms."""
    parts = {
        "data": data.create_pipeline(),
        "training": training.create_pipeline(),
        "evaluation": evaluation.create_pipeline(),
    }
    full = sum(parts.values(), Pipeline([]))
    return {"__default__": full, "full": full, **parts}
