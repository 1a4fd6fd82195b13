"""Pipeline `data`: from a source of raw files to checked, split and measured datasets."""

from kedro.pipeline import Pipeline, node

from ups.pipelines.data.nodes import (
    describe_datasets,
    download_pdebench,
    draw_cards,
    fit_normalization,
    list_folder,
    simulate_pdebench,
)


def create_pipeline() -> Pipeline:
    """Each source node does its work only if `source` names it; what follows does not know where files came from."""
    return Pipeline(
        [
            node(
                simulate_pdebench,
                inputs=["params:source", "params:simulate", "raw"],
                outputs="simulated_files",
                name="simulate_pdebench",
            ),
            node(
                download_pdebench,
                inputs=["params:source", "params:download", "raw"],
                outputs="downloaded_files",
                name="download_pdebench",
            ),
            node(
                list_folder,
                inputs=["params:source", "raw", "data_root"],
                outputs="listed_files",
                name="list_folder",
            ),
            node(
                describe_datasets,
                inputs=["simulated_files", "downloaded_files", "listed_files", "params:split", "raw", "data_root"],
                outputs="datasets",
                name="describe_datasets",
            ),
            node(
                fit_normalization,
                inputs=["datasets", "raw", "data_root"],
                outputs="normalization",
                name="fit_normalization",
            ),
            node(
                draw_cards,
                inputs=["params:source", "datasets", "normalization", "raw", "data_root"],
                outputs=["data_cards", "data_cards_text"],
                name="draw_cards",
            ),
        ]
    )
