"""Where tokens live: the grid, its boundaries and the family."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Domain:
    """The token grid, whether each of its axes is periodic, and which family lives on it (an index)."""

    family: int
    grid: tuple[int, ...]
    periodic: tuple[bool, ...]
