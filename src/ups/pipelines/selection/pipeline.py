"""Pipeline `selection`: whether choosing among candidates helps a finished emulator, and how."""

from kedro.pipeline import Pipeline, node

from ups.pipelines.evaluation.pipeline import EMULATOR, WHERE
from ups.pipelines.selection.nodes import report_selection, select


def create_pipeline() -> Pipeline:
    """Decided on the validation split, confirmed once on the test split; `evaluate` uses none of it."""
    return Pipeline(
        [
            node(
                select,
                inputs=EMULATOR | WHERE | {"config": "params:selection", "raw": "raw"},
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
