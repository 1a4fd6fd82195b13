"""Scores and selection with models of random weights: which noise they get, and what they cost."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.evaluation.test_external import CORRECTOR, config, stages
from tests.evaluation.test_selection import CONFIG
from tests.training.jobs import launched
from tests.untrained import receipt
from ups.config.evaluation import Start
from ups.evaluation.parts import score_sets
from ups.evaluation.predictions import Compute
from ups.evaluation.records import WITHOUT_LIMITS
from ups.evaluation.scores import held_out
from ups.evaluation.selection import select_all
from ups.models.state_statistics import UNLIMITED
from ups.surrogate.trained import Trained

COMPUTE = Compute(torch.device("cpu"), memory=2**30)
NUM_STEPS = 4  # of the five snapshots in the files


def test_evaluations_count_every_network(trained: Path):
    """Per time step one of the operator, and for each member of a diffusion in three steps three of the denoiser."""
    models = Trained(receipt(trained, "latent_cache"), stages(trained), trained)
    how = CONFIG.model_copy(update={"sampler": "diffusion", "if_corrector_off": Start(sigma=5.0, num_steps=3)})
    records = select_all(models, how, launched(num_processes=1), trained / "01_raw")["records"]
    of_one = [r for r in records if (r["family"], r["split"]) == ("advection_1d", "valid")]
    found = {(r["method"], r["num_members"]): r["evaluations"] for r in of_one}
    assert found["operator", 1] == NUM_STEPS
    assert found["single", 1] == NUM_STEPS * (1 + 3)
    assert {found[method, 4] for method in ("mean", "best", "weighted", "oracle", "beam")} == {4 * NUM_STEPS * (1 + 3)}


def test_every_dataset_has_noise_of_its_own(trained: Path, tmp_path: Path):
    """The same trajectories under another name are sampled with other noise, and predicted alike without noise."""
    models = Trained(receipt(trained, "latent_cache"), stages(trained) | {"corrector": CORRECTOR}, trained)
    one = next(s for s in held_out(models.cache(), trained / "01_raw") if s.dataset.family == "advection_1d")
    other = replace(one, dataset=replace(one.dataset, name="other"))
    records = score_sets(tmp_path / "scores", models.surrogate("cpu"), [one, other], config(None), COMPUTE)
    values = {(r["dataset"], r["method"], r["horizon"]): r["value"] for r in records if r["metric"] == "nRMSE"}
    same = {
        method: values[one.dataset.name, method, "rollout"] == values["other", method, "rollout"]
        for method in ("operator", "diffusion", "consistency")
    }
    assert same == {"operator": True, "diffusion": False, "consistency": False}


def test_limits_are_counted_and_lifted(trained: Path, tmp_path: Path):
    """Every model's changed states are counted; the operator's rollouts are scored as those of one without limits."""
    models = Trained(receipt(trained, "latent_cache"), stages(trained) | {"corrector": CORRECTOR}, trained)
    sets = [s for s in held_out(models.cache(), trained / "01_raw") if s.dataset.family == "advection_1d"]
    found = {}
    for limit in (1e-3, UNLIMITED):
        surrogate = models.surrogate("cpu")
        assert surrogate.operator is not None
        for name in ("max_mean", "max_fluctuation", "max_growth", "max_rms"):
            getattr(surrogate.operator.statistics, name).fill_(limit)
        records = score_sets(tmp_path / f"{limit}", surrogate, sets, config(None), COMPUTE)
        found[limit] = {(r["method"], r["metric"], r["horizon"]): r["value"] for r in records}
    limited, free = found.values()
    shares = {
        method: limited[method, "limited_steps", "rollout"] for method in ("operator", "diffusion", "consistency")
    }
    assert min(shares.values()) > 0
    assert [key for key in limited if key[1] == WITHOUT_LIMITS] == [("operator", WITHOUT_LIMITS, "rollout")]
    assert limited["operator", WITHOUT_LIMITS, "rollout"] == free["operator", "nRMSE", "rollout"]
    assert limited["operator", WITHOUT_LIMITS, "rollout"] != limited["operator", "nRMSE", "rollout"]
    assert all(key[1] != WITHOUT_LIMITS for key in free)


def test_single_steps_have_no_drift(trained: Path, tmp_path: Path):
    """The drift of an integral and the time of correlation are those of rollouts alone."""
    models = Trained(receipt(trained, "latent_cache"), {"codec": receipt(trained, "codec")}, trained)
    sets = [s for s in held_out(models.cache(), trained / "01_raw") if s.dataset.family == "advection_1d"]
    records = score_sets(tmp_path / "scores", models.surrogate("cpu"), sets, config(None), COMPUTE)
    of_time = {r["horizon"] for r in records if r["metric"] in ("conservation_drift", "correlation_time")}
    assert of_time == {"rollout"} and {r["horizon"] for r in records} == {"one_step", "rollout"}


def test_selection_is_made_on_as_many_trajectories_as_are_asked_for(trained: Path):
    """With one trajectory of each dataset every record is of one, and with more of all that are held out."""
    models = Trained(receipt(trained, "latent_cache"), stages(trained), trained)
    held = {s.dataset.name: len(s.indices) for s in held_out(models.cache(), trained / "01_raw", "valid")}
    assert max(held.values()) > 1
    for most in (1, 8):
        how = CONFIG.model_copy(update={"max_trajectories": most})
        records = select_all(models, how, launched(num_processes=1), trained / "01_raw")["records"]
        assert all(r["num_trajectories"] == min(most, held[r["dataset"]]) for r in records if r["split"] == "valid")


def test_a_corrector_that_is_off_has_the_scores_of_the_operator(trained: Path, tmp_path: Path):
    """Every record of the diffusion, which is off, is one of the operator, but for the mode; the figures lack it."""
    models = Trained(receipt(trained, "latent_cache"), stages(trained), trained)
    sets = [s for s in held_out(models.cache(), trained / "01_raw") if s.dataset.family == "advection_1d"]
    records = score_sets(tmp_path / "scores", models.surrogate("cpu"), sets, config(None), COMPUTE)
    of = {m: [r for r in records if r["method"] == m] for m in ("operator", "diffusion")}
    assert of["diffusion"] == [r | {"method": "diffusion", "mode": "off"} for r in of["operator"]]
    with np.load(tmp_path / f"scores/{sets[0].dataset.name}.npz") as arrays:
        assert "curve/operator" in arrays and "curve/diffusion" not in arrays


@pytest.mark.parametrize(
    ("memory", "corrector"),
    [
        (2, {}),
        (2, {"corrector": CORRECTOR}),
        pytest.param(2**19, {"corrector": CORRECTOR}, marks=pytest.mark.slow),
    ],
    ids=["plain", "ensembles", "some at once"],
)
def test_scores_do_not_depend_on_the_memory(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, corrector: dict
):
    """Snapshot by snapshot and member by member all families have bit for bit the numbers of all at once.

    Models that take fewer states at once round in another order, which changes the numbers by no more than that.
    """
    models = Trained(receipt(trained, "latent_cache"), stages(trained) | corrector, trained)
    given = models.surrogate("cpu"), held_out(models.cache(), trained / "01_raw"), config(None)
    whole, rounded = (score_sets(tmp_path / "a", *given, Compute(COMPUTE.device, m)) for m in (2**30, memory))
    monkeypatch.setattr(Compute, "limited", lambda _, surrogate: surrogate)
    assert score_sets(tmp_path / "b", *given, Compute(COMPUTE.device, memory)) == whole
    for record, other in zip(whole, rounded, strict=True):
        for name in {"value", "low", "high", "trajectories"} & record.keys():
            assert other[name] == pytest.approx(record[name], rel=1e-5, abs=1e-8), record


def test_the_rounding_of_stored_latents_is_scored(trained: Path, tmp_path: Path):
    """Where the receipt of the latents has a tolerance, and there alone; a larger tolerance has a larger error."""
    latents, errors = receipt(trained, "latent_cache"), []
    sets = held_out(Trained(latents, stages(trained), trained).cache(), trained / "01_raw")
    for tolerance in (1e-3, 1e-2):
        tolerances = dict.fromkeys(latents["key"]["options"]["tolerance"]) | {"advection_1d": tolerance}
        key = latents["key"] | {"options": latents["key"]["options"] | {"tolerance": tolerances}}
        surrogate = Trained(latents | {"key": key}, stages(trained), trained).surrogate("cpu")
        records = score_sets(tmp_path / str(tolerance), surrogate, sets, config(None), COMPUTE)
        found = [r for r in records if r["method"] == "rounding" and r["metric"] == "nRMSE"]
        assert [(r["family"], r["horizon"]) for r in found] == [("advection_1d", "one_step")]
        errors.append(found[0]["value"])
    assert errors[1] > 5 * errors[0] > 0
