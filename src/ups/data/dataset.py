"""What is known of a dataset without opening its files."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Dataset:
    """Trajectories of one family with one set of parameters, in one or several files of a folder.

    `files` are names relative to the folder, `counts` the trajectories in each. `times` has one entry per snapshot
    (length T, seconds of the PDE's clock); steady families have the single time 0. `boundary` has one entry per axis.
    """

    name: str
    family: str
    files: tuple[str, ...]
    counts: tuple[int, ...]
    times: tuple[float, ...]
    grid: tuple[int, ...]
    lengths: tuple[float, ...]
    boundary: tuple[str, ...]
    parameters: dict[str, float]

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "Dataset":
        """Rebuild what `dataclasses.asdict` and JSON made of a dataset."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()})

    @property
    def num_trajectories(self) -> int:
        return sum(self.counts)
