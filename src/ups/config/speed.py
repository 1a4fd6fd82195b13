"""What is measured of speed and memory."""

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from ups.config.data import SimulatedDataset
from ups.config.models import Backbone
from ups.config.sections import Section, Seed, Steps


class ProfileConfig(Section):
    """How many steps of the operator `--pipeline profile` records, after `warmup_steps` that it does not."""

    warmup_steps: PositiveInt
    steps: PositiveInt


class BenchmarkConfig(Section):
    """What `--pipeline benchmark` measures: pairs of contenders in turns, `rounds` times for about `seconds` each.

    `launches` counts starts of training processes. The operator learns on simulated `datasets`; delivering batches is
    measured on `fields`. `wide` is the model with which all speed switches are turned on together, on batches of
    `wide_batch_tokens` tokens.
    """

    seed: Seed
    rounds: PositiveInt
    seconds: PositiveFloat
    launches: PositiveInt
    codec_steps: Steps
    datasets: Annotated[list[SimulatedDataset], Field(min_length=1)]
    fields: SimulatedDataset
    wide: Backbone
    wide_batch_tokens: PositiveInt
