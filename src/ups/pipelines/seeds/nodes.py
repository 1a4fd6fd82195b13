"""The node of pipeline `seeds`: comparisons that differ in their seed alone, beside each other."""

from pathlib import Path

from ups.config import SeedsConfig
from ups.errors import ConfigFault
from ups.files import read_json


def compare_seeds(config: SeedsConfig) -> str:
    """Errors over seeds, and ours over the better baseline for each.

    Raises:
        ConfigFault: fewer than two data roots.
        DataFault: one of them has no comparison yet, or one of other datasets.
    """
    from ups.evaluation.compare import errors_of
    from ups.evaluation.seeds import seeds_text

    if len(config.data_roots) < 2:
        raise ConfigFault(
            "seeds.data_roots must name at least two data roots: the same comparison was run in each, with another seed"
        )
    reports = {name: Path(name) / "08_reporting" for name in config.data_roots}
    return seeds_text(
        {
            name: errors_of(read_json(report / "metrics.json"), read_json(report / "baseline_metrics.json"))
            for name, report in reports.items()
        }
    )
