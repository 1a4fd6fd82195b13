"""Pipeline `seeds`: how far the comparison depends on the seed."""

from kedro.pipeline import Pipeline, node

from ups.pipelines.seeds.nodes import compare_seeds


def create_pipeline() -> Pipeline:
    """Run `full` and `baselines` before it, for every seed in a data root of its own."""
    return Pipeline([node(compare_seeds, "params:seeds", "seeds_text", name="compare_seeds")])
