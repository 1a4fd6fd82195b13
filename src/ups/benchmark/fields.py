"""What the latent cache spares: the same batches from raw files, read, normalized and encoded on the fly."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ups.data.dataset import Dataset
from ups.data.loader import LatentBatch
from ups.data.pdebench import FAMILIES
from ups.data.samples import LatentSamples, domains
from ups.data.trajectories import TrajectoryReader
from ups.models.codec import Codec, group_name


class FieldSteps:
    """The samples of `steps`, each pair of snapshots encoded when it is loaded; all of a batch at once."""

    def __init__(self, steps: LatentSamples, codec: Codec, raw: Path, datasets: dict[str, Any]) -> None:
        self.steps, self.codec = steps, codec
        described = {name: Dataset.from_json(entry) for name, entry in datasets.items()}
        self._readers = {name: TrajectoryReader(raw, dataset) for name, dataset in described.items()}
        self._domains = domains(steps.cache)

    @property
    def num_samples(self) -> dict[str, int]:
        return self.steps.num_samples

    def draw(self, family: str, size: int, rng: np.random.Generator) -> np.ndarray:
        """Some of them at random."""
        return self.steps.draw(family, size, rng)

    def dataset(self, family: str, sample: int) -> str:
        """The dataset that a sample is from."""
        return self.steps.dataset(family, sample)

    @torch.no_grad()
    def load(self, family: str, samples: np.ndarray) -> LatentBatch:
        """Read, normalize and encode."""
        places = [self.steps.find(family, sample) for sample in samples]
        u = np.stack([self._readers[name].read(trajectory, time, time + 2) for name, trajectory, time in places])
        z = self.codec.encode(torch.from_numpy(u).flatten(0, 1), group_name(family, "fields"))
        z = z.unflatten(0, (len(places), 2))
        coefficients = z[:, 0, :, :0]
        if FAMILIES[family].coefficients:
            given = np.stack([self._readers[name].read_coefficients(trajectory) for name, trajectory, _ in places])
            coefficients = self.codec.encode(torch.from_numpy(given), group_name(family, "coefficients"))
        conditions = [self.steps.cache.datasets[name]["condition"] for name, _, _ in places]
        return LatentBatch(self._domains[family], z[:, 0], z[:, 1], coefficients, torch.tensor(conditions))
