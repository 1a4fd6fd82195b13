"""The method `selected`: rollouts of the ensemble members that physics chooses, where validation says that it helps.

`--pipeline selection` decides where, and how to choose; `evaluate` then scores the method beside the others.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ups.config import SelectionConfig
from ups.data.families import Dataset
from ups.evaluation.predictions import Batch, Compute, Predicted, Slab
from ups.evaluation.search import DatasetSearch, best_of, weighted_mean
from ups.evaluation.tables import SELECTED
from ups.evaluation.violations import PhysicsScore
from ups.metrics.suite import Timeline
from ups.runs.stage_cache import Receipt, fingerprint
from ups.surrogate.surrogate import Surrogate

ROLLOUT = "rollout"
CHOOSE = {"best": best_of, "weighted": weighted_mean}
SELECTION_MODULE = "ups.evaluation.selection"  # whose code, with its inputs, makes a decision

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SearchChoice:
    """How to choose along one dataset: by search method `method` among `num_members`, with a fitted score.

    `reference` and `weights` are those of the `PhysicsScore`, as lists and numbers.
    """

    config: SelectionConfig
    method: str
    num_members: int
    reference: dict[str, list]
    weights: dict[str, float]

    @classmethod
    def of(cls, config: SelectionConfig, decision: dict[str, Any], score: PhysicsScore) -> "SearchChoice":
        """The choice of a family's decision for one of its datasets."""
        reference = {name: values.tolist() for name, values in score.reference.items()}
        return cls(config, decision["method"], decision["num_members"], reference, score.weights)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "SearchChoice":
        """The choice whose values `to_json` returned."""
        return cls(**content | {"config": SelectionConfig.model_validate(content["config"])})

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return vars(self) | {"config": self.config.model_dump(mode="json")}

    def search(self, surrogate: Surrogate, dataset: Dataset, compute: Compute) -> DatasetSearch:
        """The search along the dataset, with as many members as are chosen from."""
        config = self.config.model_copy(update={"sizes": [self.num_members]})
        return DatasetSearch.of(surrogate, dataset, config, compute)

    def evaluations(self, surrogate: Surrogate, dataset: Dataset) -> int:
        """Network evaluations per step: members are sampled to choose among them, and again to predict."""
        correction = self.search(surrogate, dataset, Compute(torch.device("cpu"), 0)).correction
        return 2 * self.num_members * (1 + correction.num_steps)

    def predictor(
        self, search: DatasetSearch, generator: torch.Generator, batch: Batch
    ) -> Callable[[Slab], Iterator[Predicted]]:
        """The chosen rollouts of a batch, which is asked for one slab after the other."""
        reference = {name: torch.tensor(v, device=search.compute.device) for name, v in self.reference.items()}
        choose = _of_beam if self.method == "beam" else partial(_of_members, CHOOSE[self.method])
        rollouts = choose(search, batch, PhysicsScore(reference, self.weights), generator)

        def predict(slab: Slab) -> Iterator[Predicted]:
            u = next(rollouts)
            yield Predicted(SELECTED, (ROLLOUT,), slice(None), lambda rows: [u[None, rows]])

        return predict


def valid_choices(
    selection: dict[str, Any] | None, config: SelectionConfig, inputs: dict[str, Receipt]
) -> dict[str, dict[str, Any]]:
    """The choices by dataset that `--pipeline selection` has made for these models; none if it was for others."""
    if selection is None:
        return {}
    if selection.get("fingerprint") != fingerprint(SELECTION_MODULE, config, inputs):
        log.warning("selection.json is of other models, parameters or code and is not used: run `--pipeline selection`")
        return {}
    return selection["choices"]


# Snapshots (B, T, C, *grid) of one slab after the other. A choice depends on whole rollouts, which may not fit into
# memory: they are sampled once to choose, and once more, with the same noise, to predict.


def _of_members(
    choose: Callable[[Tensor, Tensor], Tensor],
    search: DatasetSearch,
    batch: Batch,
    score: PhysicsScore,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    same_noise, timeline = generator.clone_state(), Timeline(batch.num_times)
    for members in search.members(batch, generator):
        timeline.append({"": score(search.violations(members, batch.members_at_once), members.start)})
    scores = timeline.whole[""].mean(-1).unflatten(0, (search.num_members, -1))
    whole = [members] if members.start == 0 else search.members(batch, same_noise)
    for some in whole:
        yield choose(some.u, scores)


def _of_beam(search: DatasetSearch, batch: Batch, score: PhysicsScore, generator: torch.Generator) -> Iterator[Tensor]:
    same_noise, num_steps = generator.clone_state(), batch.num_times - 1
    places = best_places([parents for _, parents in islice(search.beam(batch, score, generator), num_steps)])
    rows = torch.arange(len(places[0]), device=places[0].device)
    kept = search.beam(batch, score, same_noise)
    path = (states[place, rows] for place, (states, _) in zip(places, kept, strict=False))
    while z := list(islice(path, batch.num_steps)):
        yield search.decoded(torch.stack(z, 1), batch)


def best_places(parents: Sequence[Tensor]) -> list[Tensor]:
    """Places (B,) in the beam, step by step, of the path that ranks first after the last step.

    `parents` (W, B) of each step are the places of the states before, see `beam_search`.
    """
    rows = torch.arange(parents[-1].shape[1], device=parents[-1].device)
    places = [torch.zeros_like(rows)]
    for of_step in reversed(parents[1:]):
        places.append(of_step[places[-1], rows])
    return places[::-1]
