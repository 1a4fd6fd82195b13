"""Scores on files that no stage has seen, and the files that are refused."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.data.conftest import write_file
from tests.evaluation.conftest import TRAINED
from tests.test_parameters import typed
from tests.training.jobs import PROJECT, launched
from tests.untrained import STAGE_NAMES, copy_some, receipt
from ups.config import WHOLE, EvaluationConfig, JudgeConfig, SubsampleConfig
from ups.data import inspection
from ups.data.families import Dataset
from ups.data.latent_cache import LatentCache
from ups.data.pdebench import FAMILIES
from ups.data.recognition import find_files
from ups.errors import DataFault
from ups.evaluation import external, figures
from ups.evaluation.external import external_sets, trained_family
from ups.pipelines.evaluation import evaluate, evaluate_external
from ups.runs.stage_cache import fingerprint
from ups.surrogate.trained import Trained

EVERY_SECOND = {"every_point": 2, "every_snapshot": 2, "first_trajectories": 3}
ALL_DATA = WHOLE.of(FAMILIES)
EVALUATION = {"folder_correctors": True, "seed": 0, "batch_tokens": 64, "ensemble_size": 4, "keep_predictions": []}
LAUNCH = launched(num_processes=1)
NOTHING_CHOSEN = None, typed().selection  # by `--pipeline selection`
LIMITS = JudgeConfig.model_validate({"first_trajectories": 1, "gates": []})
HOW = {
    "mode": "sample",
    "sigma": 5.0,
    "sigma_min": 0.02,
    "num_steps": 2,
    "residual_scale": 1.0,
    "noise_correlation": 0.0,
}
CORRECTOR = {"families": {name: dict.fromkeys(("diffusion", "consistency"), HOW) for name in TRAINED}}
TRANSIENT = {"persistence", "codec", "operator", "diffusion", "consistency"}
STEADY = {"codec", "steady", "diffusion", "consistency"}


@pytest.fixture(autouse=True)
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_figures` tests them."""
    monkeypatch.setattr(figures, "draw_figures", lambda *_: {})


def config(folder: Path | None) -> EvaluationConfig:
    """An evaluation of the test split, and of a folder."""
    return EvaluationConfig(folder=None if folder is None else str(folder), **EVALUATION)


def stages(root: Path) -> dict[str, dict[str, Any]]:
    """The receipts of all stages."""
    return {stage: receipt(root, stage) for stage in STAGE_NAMES}


def score(root: Path, folder: Path, subsample: SubsampleConfig = WHOLE, **changed: bool) -> list[dict[str, Any]]:
    """The records of the files in a folder."""
    cache, how = receipt(root, "latent_cache"), config(folder).model_copy(update=changed)
    return evaluate_external(cache, how, subsample, LIMITS, LAUNCH, root, **stages(root), corrector=CORRECTOR)[0]


def value(records: list[dict[str, Any]], method: str, metric: str = "nRMSE", horizon: str = "one_step") -> float:
    """The only number of this kind."""
    place = (method, metric, horizon)
    (found,) = (r["value"] for r in records if (r["method"], r["metric"], r["horizon"]) == place)
    return found


def test_a_folder_is_scored_with_strides(trained: Path, tmp_path: Path):
    """Persistence of every second point and snapshot has the error of the slices of the file."""
    path = write_file(tmp_path, "advection_1d", count=4, grid=(32,))
    options = SubsampleConfig(default=WHOLE.default, advection_1d=EVERY_SECOND)
    records = score(trained, tmp_path, options)
    with h5py.File(path) as file:
        u = file["tensor"][:3, ::2, ::2].astype(float)
    error = np.sqrt(((u[:, 1:] - u[:, :-1]) ** 2).mean(2) / (u[:, 1:] ** 2).mean(2)).mean()
    assert math.isclose(value(records, "persistence"), error, rel_tol=1e-5)
    assert {record["num_trajectories"] for record in records} == {3}


def test_the_test_split_as_a_folder_has_the_scores_of_the_test_split(trained: Path, held_out: Callable, tmp_path: Path):
    """Every record of a folder that holds exactly the test trajectories is that of the normal evaluation."""
    cache = receipt(trained, "latent_cache")
    given = stages(trained) | {"corrector": CORRECTOR}
    records, _ = evaluate(cache, config(None), *NOTHING_CHOSEN, LAUNCH, trained / "01_raw", trained, **given)
    assert [record | {"digest": records[i]["digest"]} for i, record in enumerate(score(trained, held_out()))] == records
    assert {record["family"] for record in records} == set(TRAINED)
    assert {r["method"] for r in records if r["family"] == "advection_1d"} == TRANSIENT


def test_snapshots_that_vanish_are_logged(
    trained: Path, held_out: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Snapshots whose nRMSE is divided by EPS are logged with dataset and number; others have no line."""
    folder = held_out()
    with h5py.File(next(folder.glob("1D_Advection*")), "r+") as file:
        file["tensor"][0, -1] = 0.0
    score(trained, folder)
    lines = [record.getMessage() for record in caplog.records if "vanish" in record.getMessage()]
    assert len(lines) == 1 and lines[0].startswith("1D_Advection") and "1 reference snapshots vanish" in lines[0]


def test_figures_leave_out_what_is_off(trained: Path):
    """A corrector that is on is drawn; one that is off, whose scores are the operator's, would only hide that."""
    cache, given = receipt(trained, "latent_cache"), stages(trained)
    on = {"families": {name: {"diffusion": HOW, "consistency": {"mode": "off"}} for name in TRAINED}}
    records, arrays = evaluate(
        cache, config(None), *NOTHING_CHOSEN, LAUNCH, trained / "01_raw", trained, **given, corrector=on
    )
    assert {r["method"] for r in records if r["family"] == "advection_1d"} == TRANSIENT
    for dataset, family in arrays["datasets"].items():
        with np.load(trained / arrays["path"] / f"{dataset}.npz") as found:
            curves = {name.removeprefix("curve/") for name in found if name.startswith("curve/")}
            assert {"median/truth", "median/prediction", "spectrum/truth"} <= set(found)
            assert not any("consistency" in name for name in found)
        assert curves == (STEADY if family == "darcy_2d" else TRANSIENT) - {"consistency"}


def test_other_resolutions_and_parameters_are_scored(trained: Path, tmp_path: Path):
    """On a finer grid with another parameter all methods have finite scores, and those that are known are right."""
    path = write_file(tmp_path, "advection_1d", "1D_Advection_Sols_beta3.0.hdf5", count=3, grid=(32,))
    write_file(tmp_path, "darcy_2d", "2D_DarcyFlow_beta0.1_Train.hdf5", count=3, grid=(16, 12))
    records = score(trained, tmp_path)
    assert all(math.isfinite(record["value"]) for record in records)
    assert {record["method"] for record in records if record["family"] == "darcy_2d"} == STEADY
    records = [record for record in records if record["family"] == "advection_1d"]
    assert {record["num_trajectories"] for record in records} == {3}
    with h5py.File(path) as file:
        u = file["tensor"][...].astype(float)
    error = np.sqrt(((u[:, 1:] - u[:, :-1]) ** 2).mean(2) / (u[:, 1:] ** 2).mean(2)).mean()
    assert value(records, "persistence") == pytest.approx(error, rel=1e-5)
    assert value(records, "codec") < 1e-5


def test_without_correctors_the_other_scores_are_the_same(trained: Path, held_out: Callable, tmp_path: Path):
    """Asked for alone, operator and steady model have the records that they have beside the correctors."""
    folder = held_out()
    records, alone = (
        score(trained, folder),
        score(trained, folder, folder_correctors=False),
    )
    assert alone == [record for record in records if record["method"] not in ("diffusion", "consistency")]


def test_a_family_may_have_several_datasets(trained: Path, tmp_path: Path):
    """Files of one family with different parameters and grids are scored each for itself."""
    for beta, points in ((0.1, 8), (0.2, 8), (0.4, 16)):
        write_file(tmp_path, "advection_1d", f"1D_Advection_Sols_beta{beta}.hdf5", count=2, grid=(points,))
    records = score(trained, tmp_path)
    assert {record["dataset"] for record in records} == {f"1D_Advection_Sols_beta{beta}" for beta in (0.1, 0.2, 0.4)}


def test_variants_of_new_files_are_of_the_trained_family(trained: Path):
    """Files of two grids are variants of one family; the models were trained on it as a whole."""
    found = receipt(trained, "latent_cache")
    cache = LatentCache.open(trained / found["path"], found["key"])
    known = next(iter(cache.datasets.values()))["dataset"]
    for family in (known["family"], f"{known['family']}-64"):
        assert trained_family(Dataset.from_json(known | {"family": family}), cache) == known["family"]


def test_a_score_does_not_depend_on_other_files(trained: Path, tmp_path: Path):
    """The samples drawn for a dataset are the same whatever lies beside it."""
    alone, both = tmp_path / "alone", tmp_path / "both"
    for folder in (alone, both):
        folder.mkdir()
        write_file(folder, "advection_1d", "1D_Advection_Sols_beta0.4.hdf5", count=2)
    write_file(both, "advection_1d", "1D_Advection_Sols_beta0.1.hdf5", count=2)
    expected = score(trained, alone)
    records = score(trained, both)
    assert [record for record in records if record["dataset"].endswith("beta0.4")] == expected


def test_boundaries_are_those_of_the_file(trained: Path, tmp_path: Path):
    """The models learned gas between open ends; a periodic file is periodic for them."""
    write_file(tmp_path, "compressible_ns_1d", "1D_CFD_Rand_Eta0.1_Zeta0.1_periodic_Train.hdf5")
    write_file(tmp_path, "compressible_ns_1d", "1D_CFD_Shock_Eta0.1_Zeta0.1_trans_Train.hdf5")
    sets = external_sets(tmp_path, find_files(tmp_path), ALL_DATA, of(trained))
    assert [each.domain.periodic for each in sets] == [(True,), (False,)]


def of(root: Path) -> Trained:
    """What was trained in a data root."""
    return Trained(receipt(root, "latent_cache"), stages(root), root)


def test_the_folder_makes_nothing_stale():
    """The fingerprint of the normal evaluation does not know the folder; that of other members it does."""
    plain, other = config(None), EvaluationConfig(folder=None, **EVALUATION | {"ensemble_size": 6})
    digest = fingerprint("ups.surrogate.surrogate", plain, {})
    assert fingerprint("ups.surrogate.surrogate", config(Path("somewhere")), {}) == digest
    assert fingerprint("ups.surrogate.surrogate", other, {}) != digest


def test_without_a_folder_nothing_changes(trained: Path):
    """`folder: null` opens no receipt and gives no records, which leave what an earlier run wrote."""
    assert evaluate_external({}, config(None), WHOLE, LIMITS, LAUNCH, trained) == ([], {}, "", {}, {})


def _unknown_family(folder: Path) -> None:
    write_file(folder, "burgers_1d")


def _foreign_name(folder: Path) -> None:
    write_file(folder, "advection_1d", "wave.hdf5")


def _other_fields(folder: Path) -> None:
    write_file(folder, "compressible_ns_1d", edit=lambda file: file.pop("pressure"))


def _odd_grid(folder: Path) -> None:
    write_file(folder, "advection_1d", grid=(9,))


def _damaged(folder: Path) -> None:
    path = write_file(folder, "advection_1d")
    path.write_bytes(path.read_bytes()[:1000])


def _not_finite(folder: Path) -> None:
    write_file(folder, "advection_1d", edit=lambda file: file["tensor"].__setitem__((2, 1, 0), np.nan))


def _not_positive(folder: Path) -> None:
    write_file(folder, "compressible_ns_1d", edit=lambda file: file["density"].__setitem__((0, 3, 0), 0.0))


def _no_file(folder: Path) -> None:
    (folder / "notes.txt").write_text("no data here")


def _no_folder(folder: Path) -> None:
    folder.rmdir()


@pytest.mark.parametrize(
    ("prepare", "line"),
    [
        (_unknown_family, "1D_Burgers_.*: the model was not trained on burgers_1d but on advection_1d, "),
        (_foreign_name, "wave.hdf5: its name matches no known family"),
        (_other_fields, "1D_CFD_.*: has no 'pressure'"),
        (_odd_grid, "1D_Advection_.*: grid 9 is not divided by the codec's patch of 2 points; .*multiples of 2"),
        (_damaged, "1D_Advection_.*: cannot be opened"),
        (_not_finite, "1D_Advection_.*: field 'u' of trajectory 2, snapshot 1, is NaN"),
        (_not_positive, "1D_CFD_.*: field 'density' of trajectory 0, snapshot 3, is not positive"),
        (_no_file, r"folder: holds no file \*.hdf5"),
        (_no_folder, "folder: no such folder"),
    ],
)
def test_bad_folders_are_refused(trained: Path, tmp_path: Path, prepare: Callable[[Path], None], line: str):
    """What cannot be scored ends in one line that names it, and what was there is still there."""
    folder = tmp_path / "folder"
    folder.mkdir()
    prepare(folder)
    with pytest.raises(DataFault, match=line) as caught:
        score(trained, folder)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "external").exists()


def test_a_changed_registry_is_noticed(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A family that has lost a field since the models were trained is refused before anything is decoded."""
    fewer = {"fields": ("density", "Vx"), "positive": ("density",), "meanings": {}}
    changed = replace(FAMILIES["compressible_ns_1d"], **fewer)
    monkeypatch.setitem(FAMILIES, "compressible_ns_1d", changed)
    monkeypatch.setattr(external, "inspect", lambda task, **request: inspection.TASKS[task](**request))  # this table
    write_file(tmp_path, "compressible_ns_1d")
    with pytest.raises(DataFault, match="has the fields density, Vx, the model was trained on 3 fields"):
        external_sets(tmp_path, find_files(tmp_path), ALL_DATA, of(trained))


@pytest.fixture
def samples() -> Path:
    """A folder with files of PDEBench's own generators."""
    folder = PROJECT.parent / "shared" / "pdebench"
    if not folder.is_dir():
        pytest.skip("the sample files are not on this machine")
    return folder


def test_real_files_of_all_layouts_are_accepted(trained: Path, samples: Path):
    """Each sample of a family that was trained is taken with its own grid, all of its files together."""
    names = [name for name in find_files(samples) if re.match("1D_Adv|1D_CFD|2D_Dar|2D_diff|ns_", name)]
    sets = {s.dataset.family: s for s in external_sets(samples, names, ALL_DATA, of(trained))}
    assert set(sets) == set(TRAINED)
    assert all(s.domain.grid == tuple(n // 2 for n in s.dataset.grid) for s in sets.values())
    assert sets["incompressible_ns_2d"].indices == tuple(range(12))


def test_real_files_are_scored(trained: Path, samples: Path, tmp_path: Path):
    """Every method has finite scores on PDEBench's own trajectories."""
    for pattern, family in {"1D_CFD*": "compressible_ns_1d", "2D_Dar*": "darcy_2d"}.items():
        for path in samples.glob(pattern):
            copy_some(path, tmp_path / path.name, family, [1])
    records = [r for r in score(trained, tmp_path) if r["metric"] == "nRMSE"]
    assert {record["method"] for record in records} == TRANSIENT | {"steady"}
    assert all(math.isfinite(record["value"]) for record in records)
