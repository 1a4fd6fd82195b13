"""The node of pipeline `seeds`: comparisons that differ in their seed alone, beside each other."""

from pathlib import Path

from ups.config import SeedsConfig
from ups.errors import ConfigFault


def compare_seeds(config: SeedsConfig) -> str:
    """Errors over seeds, and ours over the better baseline for each.

    Raises:
        ConfigFault: fewer than two data roots.
        DataFault: one of them has no comparison yet, or one of other datasets, or that of another root.
    """
    from ups.evaluation.seeds import errors_in, seeds_text

    if len(config.data_roots) < 2:
        raise ConfigFault(
            "seeds.data_roots must name at least two data roots: the same comparison was run in each, with another seed"
        )
    return seeds_text({root: errors_in(Path(root)) for root in config.data_roots})
