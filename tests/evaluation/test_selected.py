"""The method `selected` predicts what the decision says, and is scored like every other method."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation.test_parts import CONFIG as EVALUATION
from tests.evaluation.test_parts import CPU, alone, models, sets_of  # noqa: F401
from tests.evaluation.test_selection import CONFIG, Shifts, Waves, search_with, truth
from tests.training.jobs import launched
from ups.evaluation import selection
from ups.evaluation.parts import held_out_sets, make_parts
from ups.evaluation.predictions import Slab
from ups.evaluation.search import DatasetSearch, step_errors, trajectory_error
from ups.evaluation.selected import ROLLOUT, SearchChoice, valid_choices
from ups.evaluation.selection import select_all
from ups.evaluation.tables import SELECTED
from ups.pipelines import evaluation, studies
from ups.pipelines.evaluation import score_test_split
from ups.runs.stage_cache import fingerprint
from ups.surrogate.trained import Trained

STEPS = len(truth()[0]) - 1


def noise() -> torch.Generator:
    """That of the members in `DatasetSearch.run`."""
    return torch.Generator().manual_seed(2 * CONFIG.seed + 1)


def search_among(num_members: int) -> DatasetSearch:
    """Noisy shifts of which so many are sampled."""
    return replace(search_with(Shifts()), config=CONFIG.model_copy(update={"sizes": [num_members]}))


def chosen(method: str, num_members: int, waves: Waves, generator: torch.Generator) -> torch.Tensor:
    """Errors (B,) of the chosen rollouts of noisy shifts, predicted a slab at a time."""
    search = search_among(num_members)
    score, _ = search.fit([Waves()])
    choice = SearchChoice.of(CONFIG, {"method": method, "num_members": num_members}, score)
    values = json.loads(json.dumps(choice.to_json()))
    predict = SearchChoice.from_json(values).predictor(search, generator, waves)
    errors = []
    for start in range(0, STEPS, waves.num_steps):
        u_ref = truth()[:, start + 1 : start + 1 + waves.num_steps]
        (predicted,) = predict(Slab(start, u_ref, None, None, u_ref, None))
        assert (predicted.method, predicted.horizons, predicted.times) == (SELECTED, (ROLLOUT,), slice(None))
        halves = [torch.cat(list(predicted.members(rows)), 1)[0] for rows in (slice(0, 4), slice(4, 10))]
        errors.append(step_errors(torch.cat(halves), u_ref))
    return trajectory_error(torch.cat(errors, 1))


@pytest.mark.parametrize("waves", [Waves(), Waves(num_steps=1, members_at_once=1)])
@pytest.mark.parametrize(("method", "num_members"), [("best", 4), ("weighted", 4), ("best", 2), ("beam", 4)])
def test_rollouts_are_those_of_the_search(method: str, num_members: int, waves: Waves):
    """From the same noise they have the errors that the decision was made with, however many steps are read at once."""
    search, generator = search_among(num_members), noise()
    expected = search.run([Waves()], search.fit([Waves()])[0]).errors[method, num_members]
    if method == "beam":  # its noise follows that of the members
        list(search.members(Waves(), generator))
    assert torch.allclose(chosen(method, num_members, waves, generator).double(), expected, rtol=1e-5)


@pytest.fixture(scope="module")
def selected(models: Trained) -> dict[str, Any]:  # noqa: F811
    """A selection that is on wherever it can be, by another method for every family."""
    methods: Iterator[str] = iter(("best", "weighted", "beam") * 8)

    def decide(errors: dict, seed: int) -> dict[str, Any]:
        method = next(methods)
        num_members = 2 if method == "best" else 4
        return {"is_on": True, "method": method, "num_members": num_members, "num_initial_conditions": 1}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "decide", decide)
        return select_all(models, CONFIG, launched(), models.data_root / "01_raw")


@pytest.fixture(scope="module")
def choices(selected: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Its choices."""
    assert {choice["method"] for choice in selected["choices"].values()} == {"best", "weighted", "beam"}
    return json.loads(json.dumps(selected["choices"]))


def test_gains_are_confirmed_on_the_test_split(selected: dict[str, Any]):
    """The test gains of a family of one dataset are differences between the errors that its test records have."""
    for family, decision in selected["families"].items():
        of_test = [r for r in selected["records"] if (r["family"], r["split"]) == (family, "test")]
        error = {(r["method"], r["num_members"]): r["nRMSE"] for r in of_test}
        chosen = decision["method"], decision["num_members"]
        rivals = {"mean": ("mean", decision["num_members"]), "single": ("single", 1), "operator": ("operator", 1)}
        expected = {name: {"value": pytest.approx(error[rival] - error[chosen])} for name, rival in rivals.items()}
        assert decision["test_gains"] == expected
        assert decision["test_num_initial_conditions"] == of_test[0]["num_trajectories"]


def test_evaluation_scores_what_selection_has_chosen(
    choices: dict[str, Any],
    models: Trained,  # noqa: F811
    tmp_path: Path,
    alone: None,  # noqa: F811
):
    """Chosen datasets have all scores of rollouts, others none, and no other score changes; so it is in parts."""
    raw, found = models.data_root / "01_raw", []
    for num_processes, given in ((1, {}), (1, choices), (1000, choices)):
        launch = launched(num_processes=num_processes, memory_gigabytes=2.0 * num_processes)
        place = tmp_path / str(len(found))
        found.append(score_test_split(place, models, EVALUATION, launch, raw, choices=given)["records"])
    plain, whole, split = found
    own = [record for record in whole if record["method"] == SELECTED]
    assert [record for record in whole if record["method"] != SELECTED] == plain
    assert split == whole
    assert {record["dataset"] for record in own} == set(choices) and {record["horizon"] for record in own} == {ROLLOUT}
    metrics = {
        record["metric"] for record in plain if (record["method"], record["horizon"]) == ("persistence", ROLLOUT)
    }
    assert {record["metric"] for record in own} == metrics


def test_what_is_chosen_costs_its_samples(choices: dict[str, Any], models: Trained):  # noqa: F811
    """Members are sampled to choose and to predict."""
    raw, surrogate = models.data_root / "01_raw", models.surrogate("cpu")
    parts = make_parts(surrogate, held_out_sets(models, raw, None, choices), EVALUATION, num_processes=1)
    costs = {part.scored.dataset.name: part.corrected.get((SELECTED, ROLLOUT)) for part in parts}
    for name, choice in choices.items():
        (family,) = (each.dataset.family for each in sets_of(models) if each.dataset.name == name)
        steps = 1 + surrogate.corrections[CONFIG.sampler, family].num_steps
        assert costs[name] == 2 * choice["num_members"] * steps
    assert all(costs[name] is None for name in costs.keys() - choices.keys())


def test_choices_hold_for_the_models_they_were_made_for(caplog: pytest.LogCaptureFixture):
    """Other inputs or parameters make them void, with a line; without a selection there are none, and no line."""
    inputs = {"operator": {"weights": "a"}}
    made = {"choices": {"waves": {}}, "fingerprint": fingerprint("ups.evaluation.selection", CONFIG, inputs)}
    assert valid_choices(made, CONFIG, inputs) == made["choices"]
    assert valid_choices(None, CONFIG, inputs) == {} and not caplog.records
    assert valid_choices(made, CONFIG, {"operator": {"weights": "b"}}) == {}
    assert valid_choices(made, CONFIG.model_copy(update={"seed": 1}), inputs) == {}
    assert valid_choices({"families": {}}, CONFIG, inputs) == {}  # of a version before there were choices
    assert [record.getMessage()[:14] for record in caplog.records] == ["selection.json"] * 3


def test_evaluation_recomputes_the_fingerprint_of_the_selection():
    """Both nodes have the same models and the same parameters of the search."""
    nodes = {
        node.name: node for each in (evaluation.create_pipeline(), studies.create_selection()) for node in each.nodes
    }
    assert set(nodes["evaluate"].inputs) - {"params:evaluation", "selection_if_any"} == set(nodes["select"].inputs)
