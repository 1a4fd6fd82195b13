"""How training processes are started."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from ups.config.sections import Fraction, Section


class LaunchConfig(Section):
    """How training is started; none of it changes what is learned, beyond rounding.

    `num_processes` is per node; with `num_nodes` > 1 they meet at `rendezvous`, "host:port". `threads_per_process:
    null` shares the machine's cores among the processes; `device: auto` takes CUDA where there is one.
    `micro_batch_tokens`: tokens per process, forward and backward pass; null takes what `--pipeline tune` found, or
    all at once. A job that lost a worker or memory is started again `restarts` times, from the last checkpoint; one
    that makes no step for `timeout_seconds` is lost. `force` trains again what is up to date.
    """

    num_processes: PositiveInt
    num_nodes: PositiveInt
    rendezvous: Annotated[str, Field(pattern=r"^[^:/\s]+:\d+$")] | None
    threads_per_process: PositiveInt | None
    device: Literal["auto", "cpu", "cuda"]
    sharding: Literal["ddp", "fsdp"]
    bucket_megabytes: PositiveFloat
    compile: bool
    activation_checkpointing: bool
    micro_batch_tokens: PositiveInt | None
    memory_fraction: Fraction
    checkpoint_steps: PositiveInt
    checkpoint_minutes: PositiveFloat
    keep_checkpoints: PositiveInt
    restarts: Annotated[int, Field(ge=0)]
    timeout_seconds: PositiveInt
    force: bool

    @property
    def world_size(self) -> int:
        """Processes on all nodes."""
        return self.num_nodes * self.num_processes

    @model_validator(mode="after")
    def _check_nodes(self) -> "LaunchConfig":
        if self.num_nodes > 1 and self.rendezvous is None:
            raise ValueError("several nodes need a place to meet: launch.rendezvous=HOST:PORT, the host of one of them")
        return self
