"""Where tokens live: the grid, its boundaries and the family."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Domain:
    """The token grid, whether each of its axes is periodic, and which family lives on it (an index).

    A point has `num_fields` tokens, one after the other in the batch; one if a token holds all fields.
    """

    family: int
    grid: tuple[int, ...]
    periodic: tuple[bool, ...]
    num_fields: int = 1
