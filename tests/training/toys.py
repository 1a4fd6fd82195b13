"""A stage of a few numbers, trained in this process in milliseconds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.training.jobs import launched, section
from ups.config.training import TrainingSection
from ups.data.samples import Batch
from ups.runs.run import Run
from ups.training.batches import Batches
from ups.training.distributed import Draw, Ranks
from ups.training.injection import Injection
from ups.training.stage import Stage
from ups.training.update import Update

CPU = torch.device("cpu")
NUM_SAMPLES = {"advection_1d": 50, "burgers_1d": 20, "darcy_2d": 7}
NUM_TOKENS = {"advection_1d": 4, "burgers_1d": 2, "darcy_2d": 9}
SAMPLE_BYTES = dict.fromkeys(NUM_TOKENS, 1000)


@dataclass(frozen=True)
class Points(Batch):
    """Numbers x (B, 4) that are made from the numbers of the samples."""

    key: str
    x: Tensor


class Samples:
    """Points on request; two datasets per key."""

    num_samples = NUM_SAMPLES

    def draw(self, key: str, size: int, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(self.num_samples[key], size=size)

    def dataset(self, key: str, sample: int) -> str:
        return f"{key} {sample % 2}"

    def load(self, key: str, samples: np.ndarray) -> Points:
        x = torch.from_numpy(samples)[:, None] * torch.arange(1.0, 5.0)
        return Points(key, torch.sin(x + len(key)))


def loss(model: nn.Module, batch: Points, draw: Draw) -> Tensor:
    """The error of each sample (B,), with noise as the stages have it."""
    return (model(batch.x + 0.1 * draw.normal(4)) - batch.x.flip(1)).square().mean(1)


def toy_stage() -> Stage:
    """A small network, the same at every call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    return Stage(model, {}, loss, Samples(), Samples(), NUM_TOKENS, SAMPLE_BYTES)


def toy_run(folder: Path, **launch: Any) -> Run:
    """A run folder for it."""
    return Run(folder, "operator", "", {}, {}, launched(**launch), "cpu", folder)


def ranks(rank: int = 0, world_size: int = 1) -> Ranks:
    """One of so many ranks, which never speak to each other."""
    return Ranks(rank, world_size, CPU)


def toy_batches(folder: Path, rank: int = 0, world_size: int = 1, **launch: Any) -> Batches:
    """The batches of one rank."""
    injection = Injection(folder, rank)
    return Batches(toy_stage(), section(), toy_run(folder, **launch), ranks(rank, world_size), injection)


def toy_update(folder: Path, config: TrainingSection, *faults: tuple[str, int], **launch: Any) -> Update:
    """The optimizer step of the only rank, with faults (kind, step)."""
    return Update(toy_stage(), config, toy_run(folder, **launch), ranks(), Injection(folder, 0, faults))
