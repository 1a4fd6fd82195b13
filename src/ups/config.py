"""Every parameter, typed and closed: an unknown key, a wrong type or an impossible value stops before any work."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from ups.data.pdebench import FAMILIES
from ups.data.registry import ALIASES

FamilyName = Literal[tuple(FAMILIES)]  # type: ignore[valid-type]
SourceName = Literal[(*FAMILIES, *ALIASES)]  # type: ignore[valid-type]
Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Seed = Annotated[int, Field(ge=0)]
Steps = PositiveInt
PerDimension = Annotated[tuple[PositiveInt, PositiveInt, PositiveInt], Field(strict=False)]  # YAML knows lists only


class Section(BaseModel):
    """A closed section: no unknown keys, no defaults, finite numbers; text or a truth value is not a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class SimulatedDataset(Section):
    """One file to simulate: `duration` in the PDE's seconds, `resolution` in grid points per axis."""

    family: FamilyName
    parameters: dict[str, float]
    num_trajectories: Annotated[int, Field(ge=3)]
    resolution: Annotated[int, Field(ge=8)]
    num_snapshots: PositiveInt
    duration: PositiveFloat


class SimulateConfig(Section):
    """What `source: simulate` writes."""

    seed: Seed
    datasets: list[SimulatedDataset]


class DownloadConfig(Section):
    """What `source: pdebench` fetches: files of families (or tasks of the earlier stack), files by name, or both.

    `parameters`, `kind`, `resolution`, `files_per_family` and `max_gigabytes` choose among the files of `families`;
    `trajectories` fetches the first of each file only, `base_url` names a mirror with PDEBench's folders.
    """

    families: list[SourceName]
    files: list[str]
    parameters: dict[str, list[float]]
    kind: Literal["train", "test", "all"]
    resolution: PositiveInt | None
    files_per_family: PositiveInt | None
    max_gigabytes: PositiveFloat | None
    trajectories: Annotated[int, Field(ge=3)] | None
    base_url: Annotated[str, Field(pattern=r"^https?://[^/\s]+")] | None
    parallel: Annotated[int, Field(ge=1, le=16)]


class SplitConfig(Section):
    """Shares of the initial conditions held out for validation and test; the rest is for training."""

    seed: Seed
    valid_fraction: Fraction
    test_fraction: Fraction


class TrainingSection(Section):
    """What the one training loop needs.

    `batch_tokens` is global: about so many tokens per optimizer step over all processes. A batch has a multiple of
    `batch_multiple` snapshots of one family, equally many for each process. Families are drawn in proportion to (their
    number of samples)^`balance`.

    A step whose gradient norm is not finite, or above `spike_factor` times its running mean, changes nothing; more
    than `max_skipped_steps` of them end the run. `patience`: validations without a better one after which training
    ends early, with the best weights, and half of it after which schedule `plateau` halves the learning rate.
    """

    seed: Seed
    steps: Steps
    batch_tokens: PositiveInt
    batch_multiple: PositiveInt
    balance: Annotated[float, Field(ge=0.0, le=1.0)]
    optimizer: Literal["adamw", "muon"]
    learning_rate: PositiveFloat
    schedule: Literal["cosine", "step", "plateau", "constant"]
    warmup_steps: Annotated[int, Field(ge=0)]
    weight_decay: NonNegative
    clip_norm: PositiveFloat
    spike_factor: Annotated[float, Field(gt=1.0)]
    max_skipped_steps: Annotated[int, Field(ge=0)]
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)]
    precision: Literal["float32", "bfloat16"]
    patience: PositiveInt | None
    log_every: PositiveInt
    validate_every: PositiveInt

    @model_validator(mode="after")
    def _check_schedule(self) -> "TrainingSection":
        if self.schedule == "plateau" and self.patience is None:
            raise ValueError("schedule plateau needs patience: after half of it the learning rate is halved")
        return self


class CodecModel(Section):
    """Patches: at least `patch_size` per axis, and larger until a snapshot has at most `max_tokens` tokens.

    Both are given for 1D, 2D and 3D grids. `components` is the largest number of latent channels kept per field.
    """

    patch_size: PerDimension
    max_tokens: PerDimension
    components: PositiveInt


class Backbone(Section):
    """Sizes of the token mixer that operator, denoiser and steady model share."""

    hidden_channels: PositiveInt
    num_layers: PositiveInt
    modes: PositiveInt


class CodecConfig(TrainingSection):
    """Stage `codec`: fields to latents and back."""

    model: CodecModel


class LatentsConfig(Section):
    """How `encode_latents` stores latents."""

    dtype: Literal["float16", "float32"]


class OperatorConfig(TrainingSection):
    """Stage `operator`: one time step; `noise` is the std of the training noise in units of one step's change."""

    model: Backbone
    noise: NonNegative


class DiffusionConfig(TrainingSection):
    """Stage `diffusion`: EDM's log-normal noise levels (P_mean, P_std) for residuals of unit variance."""

    model: Backbone
    P_mean: float
    P_std: PositiveFloat


class ConsistencyConfig(TrainingSection):
    """Stage `consistency`: easy consistency tuning (Geng et al. 2024); pairs with sigma_next = (1 - n(t)/q) sigma."""

    P_mean: float
    P_std: PositiveFloat
    q: Annotated[float, Field(gt=1.0)]
    k: NonNegative
    b: PositiveFloat


class SteadyConfig(TrainingSection):
    """Stage `steady`: coefficient fields to steady solutions."""

    model: Backbone


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


class EvaluationConfig(Section):
    """How test trajectories are predicted: ensemble members, evaluations per step, range of noise levels."""

    seed: Seed
    batch_tokens: PositiveInt
    ensemble_size: PositiveInt
    diffusion_steps: PositiveInt
    consistency_steps: Literal[1, 2]
    sigma_min: PositiveFloat
    sigma_max: PositiveFloat


class Gate(Section):
    """A family passes when `metric` of `method` (over that of `relative_to`, if given) is at most `at_most`."""

    name: str
    method: str
    metric: str
    horizon: Literal["one_step", "rollout"]
    relative_to: str | None
    at_most: float
    applies_to: Literal["transient", "steady", "all"]


class JudgeConfig(Section):
    """The gates a run must pass."""

    gates: list[Gate]


class Parameters(Section):
    """All sections of `conf`; a misspelt section is an unknown key here."""

    source: Literal["simulate", "folder", "pdebench"]
    data_root: str
    raw_root: str | None
    simulate: SimulateConfig
    download: DownloadConfig
    split: SplitConfig
    codec: CodecConfig
    latents: LatentsConfig
    operator: OperatorConfig
    diffusion: DiffusionConfig
    consistency: ConsistencyConfig
    steady: SteadyConfig
    launch: LaunchConfig
    profile: ProfileConfig
    benchmark: BenchmarkConfig
    evaluation: EvaluationConfig
    judge: JudgeConfig

    @model_validator(mode="after")
    def _check_sections_together(self) -> "Parameters":
        if self.source == "folder" and self.raw_root is None:
            raise ValueError("source = folder needs the folder of PDEBench files: --params raw_root=DIR")
        if self.split.valid_fraction + self.split.test_fraction >= 1:
            raise ValueError("split.valid_fraction + split.test_fraction must stay below 1: training needs a share too")
        if self.evaluation.sigma_min >= self.evaluation.sigma_max:
            raise ValueError("evaluation.sigma_min must be below evaluation.sigma_max")
        return self
