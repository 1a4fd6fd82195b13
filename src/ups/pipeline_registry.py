"""The pipelines by name; explicit, because composed names must work with every way of asking for them."""

from kedro.pipeline import Pipeline

from ups.pipelines import benchmark, data, evaluation, profiling, training, tuning


def register_pipelines() -> dict[str, Pipeline]:
    """`full` is the whole house, `data`, `training` and `evaluation` are its rooms; the others measure it."""
    rooms = {
        "data": data.create_pipeline(),
        "training": training.create_pipeline(),
        "evaluation": evaluation.create_pipeline(),
    }
    tools = {
        "tune": tuning.create_pipeline(),
        "profile": profiling.create_pipeline(),
        "benchmark": benchmark.create_pipeline(),
    }
    full = sum(rooms.values(), Pipeline([]))
    return {"__default__": full, "full": full, **rooms, **tools}
