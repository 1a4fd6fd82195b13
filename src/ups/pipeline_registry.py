"""The pipelines by name; explicit, because composed names must work with every way of asking for them."""

from kedro.pipeline import Pipeline

from ups.pipelines import (
    ablation,
    baselines,
    benchmark,
    data,
    evaluation,
    finetune,
    profiling,
    seeds,
    selection,
    training,
    tuning,
)


def register_pipelines() -> dict[str, Pipeline]:
    """`full` is the whole house of `data`, `training` and `evaluation`; the others go on from it, or compare it."""
    rooms = {
        "data": data.create_pipeline(),
        "training": training.create_pipeline(),
        "evaluation": evaluation.create_pipeline(),
    }
    tools = {
        "baselines": baselines.create_pipeline(),
        "ablation": ablation.create_pipeline(),
        "finetune": finetune.create_pipeline(),
        "tune": tuning.create_pipeline(),
        "profile": profiling.create_pipeline(),
        "benchmark": benchmark.create_pipeline(),
        "selection": selection.create_pipeline(),
        "seeds": seeds.create_pipeline(),
    }
    full = sum(rooms.values(), Pipeline([]))
    return {"__default__": full, "full": full, **rooms, **tools}
