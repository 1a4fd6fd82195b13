"""Pipeline `benchmark`: how fast training is on this machine."""

from kedro.pipeline import Pipeline, node

from ups.pipelines.benchmark.nodes import measure_speed, prepare_benchmark, report_benchmark


def create_pipeline() -> Pipeline:
    """It makes its own data, so that it runs on a blank machine."""
    sections = ["params:benchmark", "params:split", "params:codec", "params:latents", "params:launch"]
    return Pipeline(
        [
            node(
                prepare_benchmark,
                inputs=[*sections, "benchmark_root"],
                outputs="benchmark_data",
                name="prepare_benchmark",
            ),
            node(
                measure_speed,
                inputs=["benchmark_data", "params:operator", "params:benchmark", "params:launch", "benchmark_root"],
                outputs="benchmark",
                name="measure_speed",
            ),
            node(
                report_benchmark,
                inputs="benchmark",
                outputs=["benchmark_text", "benchmark_figures"],
                name="report_benchmark",
            ),
        ]
    )
