"""Sections `profile` and `benchmark`: measurements of speed and memory."""

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from ups.config.data import SimulatedDataset
from ups.config.sections import Section, Seed, Steps
from ups.config.training import Backbone


class ProfileConfig(Section):
    """`--pipeline profile` records `steps` training steps of the operator, after `warmup_steps` unrecorded ones."""

    warmup_steps: PositiveInt
    steps: PositiveInt


class BenchmarkConfig(Section):
    """What `--pipeline benchmark` measures: two setups alternate for `rounds` of about `seconds_per_round` each.

    - `num_launches`: starts of a training job, from which start-up times are taken
    - `codec_steps`: training steps of the codec that encodes the data
    - `datasets`, `loading_dataset`: simulated, for training the operator and for timing the loading of batches
    - `large_model`, `large_batch_tokens`: operator and batch with which all speed switches are compared with none
    - `compiled_exports`: time exported models by `torch.compile` and AOTInductor as well, not only programs and ONNX
    """

    seed: Seed
    rounds: PositiveInt
    seconds_per_round: PositiveFloat
    num_launches: PositiveInt
    codec_steps: Steps
    datasets: Annotated[list[SimulatedDataset], Field(min_length=1)]
    loading_dataset: SimulatedDataset
    large_model: Backbone
    large_batch_tokens: PositiveInt
    compiled_exports: bool
