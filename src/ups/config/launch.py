"""The section `launch`: processes, device, memory and checkpoints of a training job."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from ups.config.sections import Fraction, Section


class LaunchConfig(Section):
    """How a stage is trained: none of these parameters changes the trained weights beyond rounding.

    Attributes:
        num_processes: Per node; on CUDA one GPU for each process.
        rendezvous: "HOST:PORT" at which several nodes find each other, an address of one in a private network.
        threads_per_process: None: the cores of the machine divided by `num_processes`.
        device: `auto` is CUDA if there is a GPU.
        sharding: `ddp` replicates the model on every rank, `fsdp` shards parameters and optimizer state.
        bucket_megabytes: Size of the messages in which DDP reduces gradients.
        micro_batch_tokens: Tokens per process and forward pass; None: what `--pipeline tune` found, or
            else what is estimated to fit into the memory of the process.
        memory_gigabytes: Memory that the processes of a node may use together, on CUDA each of them on its GPU; None:
            `memory_fraction` of what is free. Bounds what is read, encoded, predicted and scored at once.
        preload_latents: Read the latents on disk ahead into the page cache; None: if they fit into half of the memory.
        restarts: Of a job that lost a process or ran out of memory, each from the last checkpoint.
        timeout_seconds: Without a training step, after which a job counts as hung.
        force: Train again although the stage is up to date.
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
    memory_gigabytes: PositiveFloat | None
    memory_fraction: Fraction
    preload_latents: bool | None
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
            raise ValueError("several nodes need launch.rendezvous=HOST:PORT, an address of one of them")
        return self
