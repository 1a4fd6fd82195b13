"""Pipeline `selection`: whether choosing among candidates helps a finished emulator, and how."""

from kedro.pipeline import Pipeline, node

from ups.pipelines.selection.nodes import report_selection, select

STAGES = ["codec_receipt", "operator_receipt", "diffusion_receipt", "consistency_receipt", "corrector"]
SECTIONS = ["params:selection", "params:launch"]


def create_pipeline() -> Pipeline:
    """Decided on the validation split, confirmed once on the test split; `evaluate` uses none of it."""
    return Pipeline(
        [
            node(
                select,
                inputs=["latent_cache", *STAGES, *SECTIONS, "raw", "data_root"],
                outputs="selection",
                name="select",
            ),
            node(
                report_selection,
                inputs="selection",
                outputs=["selection_text", "selection_figures"],
                name="report_selection",
            ),
        ]
    )
