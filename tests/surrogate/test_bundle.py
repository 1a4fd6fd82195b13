"""Bundles: what is saved predicts the same, with torch, numpy and safetensors alone; what is damaged is refused."""

import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.contents import assert_same
from tests.surrogate.test_model import CASES
from tests.untrained import make_loadable
from ups import Family, write_dataset
from ups.data.families import Families
from ups.errors import ConfigFault, DataFault
from ups.files import UMASK, read_json, write_json
from ups.surrogate.bundle import CARD, TENSORS, TEXT
from ups.surrogate.model import Model, load


@pytest.fixture(scope="module")
def bundle(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models as a bundle; tests leave it alone."""
    folder = tmp_path_factory.mktemp("bundles") / "bundle"
    model.save(folder)
    return folder


@pytest.mark.parametrize("family", CASES)
def test_a_bundle_predicts_the_same(model: Model, bundle: Path, family: str):
    """Bit for bit, ensembles too, and so does a bundle of the bundle."""
    u_0, options = CASES[family]
    loaded = load(bundle, device="cpu")
    np.testing.assert_array_equal(loaded.predict(family, u_0, **options), model.predict(family, u_0, **options))
    assert loaded.describe(family) == model.describe(family) and loaded.families == model.families
    if model.describe(family).ensembles:
        members, expected = (each.predict(family, u_0, members=2, **options).members for each in (loaded, model))
        np.testing.assert_array_equal(members, expected)


@pytest.mark.parametrize(
    ("stage", "changed", "message"),
    [
        ("codec", {"weights": "0"}, "has a new latent cache|was not trained: finish the run"),
        (
            "operator",
            {"weights": "0"},
            "with which diffusion, consistency was not trained: finish the run, `kedro run`",
        ),
    ],
)
def test_stages_of_different_runs_are_refused(
    data_root: Path, tmp_path: Path, stage: str, changed: dict[str, str], message: str
):
    """A run that stopped after a new codec or operator has left the models that were trained with the former one."""
    root = tmp_path / "root"
    shutil.copytree(data_root, root, symlinks=True)
    path = root / f"06_models/{stage}.json"
    write_json(path, read_json(path) | changed)
    with pytest.raises(DataFault, match=message):
        load(root)


@pytest.mark.parametrize(
    ("place", "content"),
    [
        ("07_model_output/rollouts.json", {}),
        ("06_models/coverage.json", {"families": {"burgers_1d": {"threshold": 1.0}}}),
        ("06_models/corrector.json", {"families": {"burgers_1d": {"diffusion": {"mode": "sample"}}}}),
    ],
)
@pytest.mark.parametrize("models", [{}, {"models": {"operator": "0"}}])
def test_what_was_found_of_other_models_is_left_out(
    data_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str, content: Any, models: Any
):
    """After a new training: scores, coverage and corrector of the former models, which one line says."""
    root = tmp_path / "root"
    shutil.copytree(data_root, root, symlinks=True)
    record = {"family": "burgers_1d", "method": "operator", "metric": "nRMSE", "horizon": "rollout", "value": 0.5}
    for path, written in (("08_reporting/metrics.json", [record]), (place, content | models)):
        (root / path).parent.mkdir(exist_ok=True)
        write_json(root / path, written)
    loaded = load(root, device="cpu")
    assert loaded.describe("burgers_1d").scores == {} and not loaded.describe("burgers_1d").ensembles
    assert [entry["coverage"] for entry in loaded.card["families"].values()] == [None] * len(loaded.families)
    assert f"{place}: " in caplog.text and "of other models, left out" in caplog.text


def test_scores_of_these_models_are_shown(data_root: Path, tmp_path: Path):
    """Whatever else is known of their stages."""
    root = tmp_path / "root"
    shutil.copytree(data_root, root, symlinks=True)
    record = {"family": "burgers_1d", "method": "operator", "metric": "nRMSE", "horizon": "rollout", "value": 0.5}
    models = {name: read_json(root / f"06_models/{name}.json")["weights"] for name in ("codec", "operator")}
    for path, written in (
        ("08_reporting/metrics.json", [record]),
        ("07_model_output/rollouts.json", {"models": models}),
    ):
        (root / path).parent.mkdir(exist_ok=True)
        write_json(root / path, written)
    assert load(root, device="cpu").describe("burgers_1d").scores == {("operator", "nRMSE", "rollout"): 0.5}


def test_a_data_root_without_codec_is_one_line(data_root: Path, tmp_path: Path):
    """As one without any model."""
    shutil.copytree(data_root, tmp_path / "root", symlinks=True)
    (tmp_path / "root/06_models/codec.json").unlink()
    with pytest.raises(DataFault, match="holds no trained models"):
        load(tmp_path / "root")


def test_a_bundle_of_a_bundle_is_the_same_files(bundle: Path, tmp_path: Path):
    """Byte for byte; saving again into the same folder is harmless."""
    again = tmp_path / "again"
    for _ in range(2):
        load(bundle).save(again)
    for name in (CARD, TENSORS, TEXT):
        assert (again / name).read_bytes() == (bundle / name).read_bytes()
        assert stat.S_IMODE((again / name).stat().st_mode) == 0o666 & ~UMASK


def test_a_bundle_of_an_own_family_on_two_grids_is_loaded(tmp_path: Path, families: Families):
    """Its variants are known where the family was not: in another process."""
    known, root = dict(families), tmp_path / "root"
    (root / "01_raw").mkdir(parents=True)
    wave = Family("wave_1d", "u_t = u_x", ("u",), ("x",), "periodic", ())
    for n in (8, 12):
        u, x = np.random.default_rng(n).normal(size=(5, 4, n)), np.arange(n) / n
        write_dataset(root / f"01_raw/wave_{n}.hdf5", wave, {"u": u}, parameters={}, coordinates={"x": x}, dt=0.1)
    made = load(make_loadable(root, (), count=0), device="cpu")
    made.save(tmp_path / "bundle")
    families.clear()
    families.update(known)
    assert load(tmp_path / "bundle", device="cpu").families == made.families == ("wave_1d-12", "wave_1d-8")


def test_a_bundle_can_be_moved(bundle: Path, tmp_path: Path):
    """The data root, from which it was made, is not needed."""
    shutil.copytree(bundle, tmp_path / "elsewhere")
    assert load(tmp_path / "elsewhere").families


def test_the_card_describes_every_family(model: Model, bundle: Path):
    """With its fields, grid and trained parameters, and says how the bundle is loaded."""
    text = (bundle / TEXT).read_text(encoding="utf-8")
    assert all(f"## {family}" in text for family in model.families)
    assert "ups.load(" in text and "| nu | trained at 0.01, 0.1 |" in text


@pytest.mark.parametrize("name", ["notes.txt", "data"])
def test_a_folder_with_other_files_is_not_written_to(model: Model, tmp_path: Path, name: str):
    """Nor a path that is a file."""
    (tmp_path / name).write_text("mine")
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(ConfigFault, match="is not an empty folder: choose a new one"):
            model.save(place)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def _cut(folder: Path) -> None:
    content = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(content[: len(content) // 2])


def _flip(folder: Path) -> None:
    content = bytearray((folder / TENSORS).read_bytes())
    content[-1] ^= 1
    (folder / TENSORS).write_bytes(content)


def _with(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        card = json.loads((folder / CARD).read_text())
        change(card)
        write_json(folder / CARD, card)

    return edit


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda folder: (folder / TENSORS).unlink(), f"{TENSORS} is missing or differs from the hash"),
    "half of the weights": (_cut, f"{TENSORS} is missing or differs from the hash"),
    "one bit": (_flip, f"{TENSORS} is missing or differs from the hash"),
    "no card": (lambda folder: (folder / CARD).unlink(), "holds no trained models"),
    "text": (lambda folder: (folder / CARD).write_text("hello"), f"{CARD} is not valid JSON"),
    "no text": (lambda folder: (folder / CARD).write_bytes(b"\xff\xfe"), f"{CARD} is not valid JSON"),
    "list": (lambda folder: (folder / CARD).write_text("[]"), f"{CARD} is not the card of a bundle"),
    "NaN": (lambda folder: (folder / CARD).write_text('{"a": NaN}'), "NaN is no number"),
    "newer": (_with(lambda card: card.update(format=99, ups="9.9")), "has format 99, .* reads 2: install ups 9.9"),
    "no settings": (_with(lambda card: card.pop("settings")), f"{CARD} is not the card of a bundle"),
    "no family": (_with(lambda card: card["families"].clear()), f"{CARD} differs from the hash that it holds"),
    "other corrections": (_with(lambda card: card["corrections"].pop()), "differs from the hash that it holds"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_bundle_is_refused(bundle: Path, tmp_path: Path, damage: Callable[[Path], object], message: str):
    """In one line that names the file."""
    folder = tmp_path / "damaged"
    shutil.copytree(bundle, folder)
    damage(folder)
    with pytest.raises(DataFault, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def needed(name: str) -> set[str]:
    """A distribution and all that it needs, without its extras."""
    found, queue = set(), [name]
    while queue:
        if (name := canonicalize_name(queue.pop())) not in found:
            found.add(name)
            try:
                own = map(Requirement, requires(name) or [])
            except PackageNotFoundError:  # of another platform
                continue
            queue += [each.name for each in own if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


SCRIPT = """
import sys

allowed = set(sys.stdlib_module_names) | set(sys.argv[2].split())

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed and not name.startswith("_"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import ups
assert "torch" not in sys.modules
import numpy as np
model = ups.load(sys.argv[1])
u = model.predict("burgers_1d", np.load(sys.argv[1] + ".npy"), steps=3, nu=0.1)
members = model.predict("advection_1d", np.load(sys.argv[1] + ".npy"), steps=1, members=2).mean
model.save(sys.argv[1] + ".copy")
np.save(sys.argv[1] + ".out.npy", u)
"""


def test_a_bundle_needs_torch_numpy_and_safetensors_alone(model: Model, bundle: Path, tmp_path: Path):
    """Every other package is refused: Kedro, pydantic, SciPy, zarr; the numbers are those of the data root."""
    u_0 = np.linspace(0.5, 1.5, 8, dtype=np.float32)
    shutil.copytree(bundle, tmp_path / "bundle")
    np.save(tmp_path / "bundle.npy", u_0)
    distributions = needed("torch") | needed("numpy") | needed("safetensors")
    modules = {module: set(map(canonicalize_name, names)) for module, names in packages_distributions().items()}
    allowed = {"ups", *(module for module, names in modules.items() if names & distributions)}
    assert not allowed & {"pydantic", "kedro", "mlflow", "scipy", "zarr", "xarray", "h5py"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "bundle"), " ".join(allowed)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert completed.returncode == 0, completed.stderr
    expected = model.predict("burgers_1d", u_0, steps=3, nu=0.1)
    assert_same(np.load(tmp_path / "bundle.out.npy"), expected)


def test_the_registry_needs_more(tmp_path: Path):
    """Without MLflow its models cannot be loaded, which one line says."""
    script = "import sys; sys.modules['mlflow'] = None; import ups; ups.load('models:/ups@champion')"
    completed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert completed.stderr.splitlines()[-1].endswith(
        "ConfigFault: models:/ups@champion needs mlflow: install ups with its dependencies"
    )
