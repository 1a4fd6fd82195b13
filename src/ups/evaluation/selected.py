"""The method `selected`: rollouts of the ensemble members that physics chooses, where validation says that it helps.

`--pipeline selection` decides where, and how to choose; `evaluate` then scores the method beside the others.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ups.config import SelectionConfig
from ups.data.families import Dataset
from ups.evaluation.predictions import Batch, Compute, Predicted, Slab
from ups.evaluation.search import DatasetSearch, best_of, weighted_mean
from ups.evaluation.violations import PhysicsScore
from ups.metrics.suite import Timeline
from ups.runs.stage_cache import Receipt, fingerprint
from ups.surrogate.surrogate import Surrogate

SELECTED, ROLLOUT = "selected", "rollout"
SELECTION = "ups.evaluation.selection"  # the module whose code, with its inputs, makes a decision

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """How to choose along one dataset: by search method `method` among `num_members`, with a fitted score.

    `reference` and `weights` are those of the `PhysicsScore`, as lists and numbers.
    """

    config: SelectionConfig
    method: str
    num_members: int
    reference: dict[str, list]
    weights: dict[str, float]

    @classmethod
    def of(cls, config: SelectionConfig, decision: dict[str, Any], score: PhysicsScore) -> "Choice":
        """The choice of a family's decision for one of its datasets."""
        reference = {name: values.tolist() for name, values in score.reference.items()}
        return cls(config, decision["method"], decision["num_members"], reference, score.weights)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Choice":
        """The choice whose values `to_json` returned."""
        return cls(**content | {"config": SelectionConfig.model_validate(content["config"])})

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return vars(self) | {"config": self.config.model_dump(mode="json")}

    @property
    def num_sampled(self) -> int:
        """Members that are sampled; the first `num_members` are chosen from."""
        return max(self.config.sizes)

    def search(self, surrogate: Surrogate, dataset: Dataset, compute: Compute) -> DatasetSearch:
        """The search along the dataset, with the members of the decision."""
        return DatasetSearch.of(surrogate, dataset, self.config, compute)

    def evaluations(self, surrogate: Surrogate, dataset: Dataset) -> int:
        """Network evaluations per step: members are sampled to choose, and but for the beam again to predict."""
        num_steps = self.search(surrogate, dataset, Compute(torch.device("cpu"), 0)).correction.num_steps
        sampled = self.num_members if self.method == "beam" else 2 * self.num_sampled
        return sampled * (1 + num_steps)

    def predictor(
        self, search: DatasetSearch, generator: torch.Generator, batch: Batch
    ) -> Callable[[Slab], Iterator[Predicted]]:
        """The chosen rollouts of a batch, which is asked for one slab after the other."""
        score = self._score(search.compute.device)
        if self.method == "beam":
            rollouts = _of_beam(search, batch, score, generator)
        else:
            rollouts = self._of_members(search, batch, score, generator)

        def predict(slab: Slab) -> Iterator[Predicted]:
            u = next(rollouts)
            yield Predicted(SELECTED, (ROLLOUT,), slice(None), lambda rows: [u[None, rows]])

        return predict

    def _score(self, device: torch.device) -> PhysicsScore:
        reference = {name: torch.tensor(values, device=device) for name, values in self.reference.items()}
        return PhysicsScore(reference, self.weights)

    def _of_members(
        self, search: DatasetSearch, batch: Batch, score: PhysicsScore, generator: torch.Generator
    ) -> Iterator[Tensor]:
        """Snapshots (B, T, C, *grid) of each slab: the choice depends on whole rollouts, which are sampled twice."""
        same_noise, timeline = generator.clone_state(), Timeline(batch.num_times)
        for members in search.members(batch, generator):
            timeline.append({"": score(search.violations(members, batch.members_at_once), members.start)})
        scores = timeline.whole[""].mean(-1).unflatten(0, (search.num_members, -1))[: self.num_members]
        choose = best_of if self.method == "best" else weighted_mean
        for members in search.members(batch, same_noise):
            yield choose(members.u[: self.num_members], scores)


def valid_choices(
    selection: dict[str, Any] | None, config: SelectionConfig, inputs: dict[str, Receipt]
) -> dict[str, dict[str, Any]]:
    """The choices by dataset that `--pipeline selection` has made for these models; none if it was for others."""
    if selection is None:
        return {}
    if selection.get("fingerprint") != fingerprint(SELECTION, config, inputs):
        log.warning("selection.json is of other models, parameters or code and is not used: run `--pipeline selection`")
        return {}
    return selection["choices"]


def _of_beam(search: DatasetSearch, batch: Batch, score: PhysicsScore, generator: torch.Generator) -> Iterator[Tensor]:
    """Snapshots (B, T, C, *grid) of each slab, along the path that is best in the end."""
    path = best_path(islice(search.beam(batch, score, generator), batch.num_times - 1))
    for z in path.split(batch.num_steps, 1):
        yield search.decoded(z, batch)


def best_path(kept: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """States (B, T, ...) of the path that a beam ranks first after its last step, see `beam_search`."""
    steps = list(kept)
    rows = torch.arange(steps[-1][0].shape[1], device=steps[-1][0].device)
    place, path = torch.zeros_like(rows), []
    for states, parents in reversed(steps):
        path.append(states[place, rows])
        place = parents[place, rows]
    return torch.stack(path[::-1], 1)
