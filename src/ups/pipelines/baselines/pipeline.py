"""Pipeline `baselines`: what one would use instead, per family, at equal cost; and the table that compares."""

from kedro.pipeline import Pipeline, node

from ups.evaluation import PLAIN_STAGES
from ups.pipelines.baselines.nodes import (
    baseline_trainer,
    budget,
    compare,
    evaluate_baselines,
    make_points,
    measure_costs,
    measure_pace,
)
from ups.pipelines.evaluation.pipeline import EMULATOR, STAGES, WHERE
from ups.pipelines.training.nodes import encode_latents

KINDS = ("fno", "unet", "linear")
MODELS = {kind: f"{kind}_receipts" for kind in KINDS}
OURS = {stage: STAGES[stage] for stage in PLAIN_STAGES}


def create_pipeline() -> Pipeline:
    """Run it after `full`, whose data, receipts and scores it takes; every model is trained once."""
    train = ["fields", "pace", "budget", "params:baselines", "params:launch", "data_root"]
    return Pipeline(
        [
            node(make_points, ["datasets", "normalization", "data_root"], "points_receipt", name="make_points"),
            node(
                encode_latents,
                ["datasets", "points_receipt", "params:latents", "params:launch", "raw", "data_root"],
                "fields",
                name="lay_out_fields",
            ),
            node(
                measure_pace,
                OURS
                | {"fields": "fields", "config": "params:baselines", "launch": "params:launch"}
                | {"raw": "raw", "data_root": "data_root"},
                "pace",
                name="measure_pace",
            ),
            node(
                budget,
                OURS | {"pace": "pace", "latent_cache": "latent_cache", "data_root": "data_root"},
                "budget",
                name="budget",
            ),
            *(node(baseline_trainer(kind), train, f"{kind}_receipts", name=f"train_{kind}") for kind in KINDS),
            node(
                evaluate_baselines,
                ["fields", "points_receipt", *MODELS.values()]
                + ["params:evaluation", "params:launch", "raw", "data_root"],
                "baseline_metrics",
                name="evaluate_baselines",
            ),
            node(
                measure_costs,
                EMULATOR | MODELS | WHERE | {"fields": "fields", "points": "points_receipt", "raw": "raw"},
                "costs",
                name="measure_costs",
            ),
            node(
                compare,
                ["metrics", "baseline_metrics", "costs", "budget"],
                ["table", "comparison"],
                name="compare",
            ),
        ]
    )
