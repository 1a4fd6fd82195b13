"""Small backbones for tests."""

from typing import Any

from ups.models.sizes import Backbone

SMALL = {
    "hidden_channels": (8, 8, 8),
    "num_layers": 2,
    "levels": 1,
    "norm": True,
    "separate_trunks": True,
    "separate_fields": False,
    "mixing": "fourier",
    "modes": (4, 4, 4),
    "head_channels": 16,
}
SMALL |= {"window": None, "qk_norm": True, "drop_path": 0.0, "conditioning": True}


def small(**choices: Any) -> Backbone:
    """Two layers of eight channels, changed by `choices`."""
    return Backbone(**SMALL | choices)
