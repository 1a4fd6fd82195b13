"""Scores and selection with models of random weights: which noise they get, and what they cost."""

from dataclasses import replace
from pathlib import Path

from tests.evaluation.test_external import CORRECTOR, config, stages
from tests.evaluation.test_selection import CONFIG
from tests.untrained import receipt
from ups.config.evaluation import Start
from ups.evaluation.scores import held_out, score_sets
from ups.evaluation.selection import select_all
from ups.surrogate.trained import Trained

NUM_STEPS = 4  # of the five snapshots in the files


def test_evaluations_count_every_network(trained: Path):
    """Per time step one of the operator, and for each member of a diffusion in three steps three of the denoiser."""
    models = Trained(receipt(trained, "latent_cache"), stages(trained), trained)
    how = CONFIG.model_copy(update={"sampler": "diffusion", "if_corrector_off": Start(sigma=5.0, num_steps=3)})
    records = select_all(models, how, "cpu", trained / "01_raw")["records"]
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
    records = score_sets(tmp_path / "scores", models.surrogate("cpu"), [one, other], config(None), "cpu")
    values = {(r["dataset"], r["method"], r["horizon"]): r["value"] for r in records if r["metric"] == "nRMSE"}
    same = {
        method: values[one.dataset.name, method, "rollout"] == values["other", method, "rollout"]
        for method in ("operator", "diffusion", "consistency")
    }
    assert same == {"operator": True, "diffusion": False, "consistency": False}


def test_single_steps_have_no_drift(trained: Path, tmp_path: Path):
    """The drift of an integral and the time of correlation are those of rollouts alone."""
    models = Trained(receipt(trained, "latent_cache"), {"codec": receipt(trained, "codec")}, trained)
    sets = [s for s in held_out(models.cache(), trained / "01_raw") if s.dataset.family == "advection_1d"]
    records = score_sets(tmp_path / "scores", models.surrogate("cpu"), sets, config(None), "cpu")
    of_time = {r["horizon"] for r in records if r["metric"] in ("conservation_drift", "correlation_time")}
    assert of_time == {"rollout"} and {r["horizon"] for r in records} == {"one_step", "rollout"}


def test_selection_is_made_on_as_many_trajectories_as_are_asked_for(trained: Path):
    """With one trajectory of each dataset every record is of one, and with more of all that are held out."""
    models = Trained(receipt(trained, "latent_cache"), stages(trained), trained)
    held = {s.dataset.name: len(s.indices) for s in held_out(models.cache(), trained / "01_raw", "valid")}
    assert max(held.values()) > 1
    for most in (1, 8):
        how = CONFIG.model_copy(update={"max_trajectories": most})
        records = select_all(models, how, "cpu", trained / "01_raw")["records"]
        assert all(r["num_trajectories"] == min(most, held[r["dataset"]]) for r in records if r["split"] == "valid")
