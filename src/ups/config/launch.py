"""Sections `launch` and `submit`: how training jobs run, and what they need of a cluster or cloud.

Sections `profile` and `benchmark`: measurements of speed and memory.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from ups.config.data import SimulatedDataset
from ups.config.sections import Fraction, RemoteFolder, Section, Seed, Steps
from ups.config.training import Backbone
from ups.errors import nearest

NCCL = (
    "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_CROSS_NIC", "NCCL_CUMEM_ENABLE", "NCCL_DEBUG", "NCCL_IB_DISABLE",
    "NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_IB_TC", "NCCL_IB_TIMEOUT", "NCCL_MAX_CTAS", "NCCL_MIN_CTAS",
    "NCCL_NET_GDR_LEVEL", "NCCL_NTHREADS", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO",
    "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME",
)  # fmt: skip


def _expect_variables(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        if name not in NCCL:
            raise ValueError(f"unknown variable {name}{nearest(name, NCCL)}")
        if not re.fullmatch(r"[A-Za-z0-9_^=,.:/-]+", value):
            raise ValueError(f"{name} = {value!r}: use only letters, digits and _^=,.:/-, at least one")
    return variables


def _expect_mode(value: Any) -> Any:
    if not isinstance(value, bool) and value != "reduce-overhead":
        raise ValueError(f"{value!r} is none of true, false, reduce-overhead")
    return value


NcclText = Annotated[str, Field(strict=False, coerce_numbers_to_str=True)]


class LaunchConfig(Section):
    """How a stage is trained: none of these parameters changes the trained weights beyond rounding.

    - `num_processes`: per node; on CUDA one GPU for each process
    - `rendezvous`: "HOST:PORT" at which several nodes meet, an address of the first one in a private network
    - `threads_per_process`: None: the cores of the machine divided by `num_processes`
    - `device`: `auto` is CUDA if there is a GPU
    - `sharding`: `ddp` replicates the model on every rank, `fsdp` shards parameters and optimizer state, `fsdp-offload`
      also keeps the shards in the memory of the CPU, which takes the optimizer's steps
    - `bucket_megabytes`: size of the messages in which DDP reduces gradients
    - `exchange_precision`: in which DDP sends gradients; `bfloat16` halves the bytes and rounds to 8 significant bits.
      Float16 is not offered, because gradients below 6e-8 would become zero; nor are shards, because FSDP2 would add
      up the gradients of micro-batches in that precision, and fails at parameters that a batch does not use
    - `nccl`: environment variables of training processes on GPUs, as NVIDIA's manual of NCCL describes them
    - `compile`: of the blocks; `reduce-overhead` also replays their kernels as CUDA graphs, which takes a GPU, replicas
      and kept activations, because a graph expects its tensors at the same addresses
    - `deterministic`: refuse operations whose result depends on the order of threads of a GPU
    - `micro_batch_tokens`: tokens per process and forward pass; None: what `--pipeline tune` found, or else what is
      estimated to fit into the memory of the process
    - `memory_gigabytes`: memory that the processes of a node may use together, on CUDA each of them on its GPU;
      None: `memory_fraction` of what is free. Bounds what is read, encoded, predicted and scored at once
    - `preload_latents`: read the latents on disk ahead into the page cache; None: if they fit into half of the
      memory
    - `latent_store`: S3 folder in which machines share encoded latents, one folder for each key of the latent cache
    - `restarts`: of a training that lost a process or ran out of memory, each from the last checkpoint
    - `timeout_seconds`: without progress, after which a job counts as hung
    - `force`: train again although the stage is up to date; an interrupted training goes on
    """

    num_processes: PositiveInt
    num_nodes: PositiveInt
    rendezvous: Annotated[str, Field(pattern=r"^[^:/\s]+:\d+$")] | None
    threads_per_process: PositiveInt | None
    device: Literal["auto", "cpu", "cuda"]
    sharding: Literal["ddp", "fsdp", "fsdp-offload"]
    bucket_megabytes: PositiveFloat
    exchange_precision: Literal["float32", "bfloat16"]
    nccl: Annotated[dict[NcclText, NcclText], AfterValidator(_expect_variables)]
    compile: Annotated[bool | Literal["reduce-overhead"], BeforeValidator(_expect_mode)]
    activation_checkpointing: bool
    deterministic: bool
    micro_batch_tokens: PositiveInt | None
    memory_gigabytes: PositiveFloat | None
    memory_fraction: Fraction
    preload_latents: bool | None
    latent_store: RemoteFolder | None
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
            raise ValueError("several nodes need launch.rendezvous=HOST:PORT, an address of the first one")
        return self

    @model_validator(mode="after")
    def _check_switches(self) -> "LaunchConfig":
        if self.sharding == "fsdp-offload" and self.world_size == 1:
            raise ValueError("launch.sharding=fsdp-offload needs several processes")
        if self.exchange_precision != "float32" and self.sharding != "ddp":
            raise ValueError("launch.exchange_precision=bfloat16 needs sharding=ddp")
        if self.compile == "reduce-overhead" and (self.sharding != "ddp" or self.activation_checkpointing):
            raise ValueError("launch.compile=reduce-overhead needs sharding=ddp and activation_checkpointing=false")
        return self


Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
SbatchOption = Annotated[str, Field(pattern=r"^--[a-z][a-z-]*(=[^\s]+)?$")]


class SubmitConfig(Section):
    """What `ups launch` asks of a cluster or cloud; sizes are those of one node.

    Attributes:
        name: Of the job, a DNS label, as Kubernetes wants it.
        accelerator: GPU by its name at the target, `launch.num_processes` of them; None: CPUs alone.
        storage: Bucket (sky), volume (dstack) or PersistentVolumeClaim (k8s, trainjob) that keeps the data root.
        secrets: Environment variables, whose values are never written anywhere.
    """

    name: Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$")]
    nodes: PositiveInt
    accelerator: Word | None
    cores: PositiveInt
    memory_gigabytes: PositiveInt
    disk_gigabytes: PositiveInt
    hours: PositiveFloat
    spot: bool
    num_seeds: PositiveInt
    image: Word | None
    storage: Word | None
    secrets: list[Variable]
    sbatch_options: list[SbatchOption]
    setup: list[str]

    @property
    def minutes(self) -> int:
        """The time limit in whole minutes, at least one."""
        return max(1, round(60 * self.hours))


class ProfileConfig(Section):
    """`--pipeline profile` records `steps` training steps of the operator, after `warmup_steps` unrecorded ones."""

    warmup_steps: PositiveInt
    steps: PositiveInt


class BenchmarkConfig(Section):
    """What `--pipeline benchmark` measures: two setups alternate for `rounds` of about `seconds_per_round` each.

    - `num_launches`: starts of a training job, from which start-up times are taken
    - `codec_steps`: training steps of the codec that encodes the data
    - `datasets`, `loading_datasets`: simulated, for training the operator and for timing the loading of batches; the
      first of the latter is also encoded again and has layout `tensor`
    - `large_model`, `large_batch_tokens`: operator and batch with which all speed switches are compared with none
    - `compiled_exports`: time exported models by `torch.compile` and AOTInductor as well, not only programs and ONNX
    """

    seed: Seed
    rounds: PositiveInt
    seconds_per_round: PositiveFloat
    num_launches: PositiveInt
    codec_steps: Steps
    datasets: Annotated[list[SimulatedDataset], Field(min_length=1)]
    loading_datasets: Annotated[list[SimulatedDataset], Field(min_length=1)]
    large_model: Backbone
    large_batch_tokens: PositiveInt
    compiled_exports: bool

    @model_validator(mode="after")
    def _check_families(self) -> "BenchmarkConfig":
        names = [dataset.family for dataset in self.loading_datasets]
        if len(names) != len(set(names)) or {dataset.family for dataset in self.datasets} & set(names):
            raise ValueError("loading_datasets must be of different families, which benchmark.datasets does not have")
        return self
