"""What belongs to the identity of a step, and what does not."""

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from ups.runs.stage_cache import fingerprint

SOURCE = Path(__file__).parents[2] / "src" / "ups"
STAGES = ("codec", "operator", "diffusion", "consistency", "steady")
LOOP = "training.loop"
SHARED_BY = {
    "latents": "training.encoding",
    "scores": "evaluation.parts",
    "corrector": "evaluation.choice",
}  # steps that several processes share
TRAINED_BY = {stage: (f"training.stages.{stage}", LOOP) for stage in STAGES}

TOY = {
    "__init__": '"""Toy package."""\n',
    "stage": "from {name}.config import C\nfrom {name}.middle import f\n\n\ndef work(x):\n    return f(x)\n",
    "middle": "import {name}.leaf\n\n\ndef f(x):\n    from {name}.late import g\n\n    return g({name}.leaf.C * x)\n",
    "leaf": "import {name}.configured\nimport {name}.data.pdebench\n\nC = 2\n",
    "late": "from {name}.deep import STEP, inner\n\n\ndef g(x):\n    return STEP * inner.h(x)\n",
    "deep/__init__": "STEP = 1\n",
    "deep/inner": "def h(x):\n    return x + 1\n",
    "unrelated": "C = 3\n",
    "configured": "C = 5\n",
    "config/__init__": "from {name}.config.sections import C\n",
    "config/sections": "from {name}.reached import C\n",
    "reached": "C = 4\n",
    "data/__init__": "",
    "data/pdebench": "FAMILIES = ()\n",
}


class Section(BaseModel):
    """A section of the configuration."""

    learning_rate: float


def digests(package: Path, modules: Iterable[str]) -> dict[str, str]:
    """The code digests as a new process sees them: with nothing cached yet."""
    importlib.invalidate_caches()
    spec = importlib.util.find_spec("ups.runs.stage_cache")
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return {module: fresh.code_digest(f"{package.name}.{module}") for module in modules}


def digest(package: Path) -> str:
    """The code digest of the toy's stage."""
    return digests(package, ["stage"])["stage"]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that nobody has imported yet."""
    package = tmp_path / re.sub(r"\W", "_", f"toy_{tmp_path.name}")
    for module, code in TOY.items():
        path = package / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code.replace("{name}", package.name))
    monkeypatch.syspath_prepend(tmp_path)
    return package


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """This package under another name, free to be edited."""
    package = tmp_path_factory.mktemp("copy") / "copy_of_ups"
    for path in SOURCE.rglob("*.py"):
        target = package / path.relative_to(SOURCE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(re.sub(r"\bups\b", package.name, path.read_text()))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(package.parent)
        yield package


@pytest.fixture(scope="module")
def unedited(copy: Path) -> dict[str, str]:
    """The digests of all steps before any edit."""
    return digests(copy, {module for modules in (*TRAINED_BY.values(), SHARED_BY.values()) for module in modules})


def changed_by(edited: Iterable[str], copy: Path, unedited: dict[str, str]) -> set[str]:
    """The steps whose digest an edit of these modules changes; the modules are then as before."""
    before = {path: path.read_text() for path in (copy / f"{module}.py" for module in edited)}
    for path, code in before.items():
        path.write_text(f"{code}\nEDITED = 1\n")
    after = digests(copy, unedited)
    for path, code in before.items():
        path.write_text(code)
    return {module for module in unedited if after[module] != unedited[module]}


def edit(path: Path, change: Callable[[str], str]) -> None:
    """Replace the code of a module by its changed version."""
    before = path.read_text()
    path.write_text(change(before))
    assert path.read_text() != before


PROSE = {
    "comment": lambda code: f"# why\n{code}  # because\n",
    "module docstring": lambda code: f'"""Prose."""\n{code}',
    "function docstring": lambda code: code.replace("(x):\n", '(x):\n    """Prose."""\n'),
    "blank lines": lambda code: code.replace("\n", "\n\n"),
    "line breaks": lambda code: code.replace("return x + 1", "return (\n        x\n        + 1\n    )"),
}


@pytest.mark.parametrize("change", PROSE.values(), ids=PROSE.keys())
def test_prose_changes_nothing(toy: Path, change: Callable[[str], str]):
    """Comments, docstrings and the layout of the code are no part of the digest."""
    before = digest(toy)
    edit(toy / "deep" / "inner.py", change)
    assert digest(toy) == before


@pytest.mark.parametrize(
    "module", ["stage", "middle", "leaf", "late", "deep/__init__", "deep/inner", "configured", "reached"]
)
def test_reachable_code_counts(toy: Path, module: str):
    """An edit counts wherever it is reached: directly, over other modules, by an import inside a function."""
    before = digest(toy)
    edit(toy / f"{module}.py", lambda code: f"{code}\nD = 5\n")
    assert digest(toy) != before


@pytest.mark.parametrize("module", ["__init__", "unrelated", "config/__init__", "config/sections", "data/pdebench"])
def test_unreachable_code_does_not_count(toy: Path, module: str):
    """Modules that the step does not import, configuration types and the table of families change nothing."""
    before = digest(toy)
    edit(toy / f"{module}.py", lambda code: f"{code}\nD = 5\n")
    assert digest(toy) == before


def test_constant_counts(toy: Path):
    """Another number in the code is another digest, and undoing the edit brings the old one back."""
    before = digest(toy)
    edit(toy / "leaf.py", lambda code: code.replace("2", "2.5"))
    assert digest(toy) != before
    edit(toy / "leaf.py", lambda code: code.replace("2.5", "2"))
    assert digest(toy) == before


def test_swapped_modules_count(toy: Path):
    """The same code in other places is not the same program."""
    before, leaf, late = digest(toy), toy / "leaf.py", toy / "late.py"
    swapped = late.read_text(), leaf.read_text()
    leaf.write_text(swapped[0])
    late.write_text(swapped[1])
    assert digest(toy) != before


def test_nothing_is_imported(toy: Path):
    """The digest reads the code and never runs it."""
    edit(toy / "stage.py", lambda code: f"{code}\nraise RuntimeError\n")
    assert digest(toy)


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        (Section(learning_rate=0.2), {"data": {"md5": "a"}}),
        (None, {"data": {"md5": "a"}}),
        (Section(learning_rate=0.1), {"data": {"md5": "b"}}),
        (Section(learning_rate=0.1), {"other": {"md5": "a"}}),
        (Section(learning_rate=0.1), {}),
    ],
    ids=["parameter", "no section", "receipt", "name of the input", "no input"],
)
def test_fingerprint_covers_parameters_and_inputs(config: Section | None, inputs: dict):
    """A parameter or the receipt of an input changes the fingerprint."""
    same = fingerprint("ups.surrogate.surrogate", Section(learning_rate=0.1), {"data": {"md5": "a"}})
    assert fingerprint("ups.surrogate.surrogate", Section(learning_rate=0.1), {"data": {"md5": "a"}}) == same
    assert fingerprint("ups.surrogate.surrogate", config, inputs) != same


def test_fingerprint_covers_code():
    """The same parameters and inputs for two modules are two steps."""
    assert fingerprint("ups.surrogate.surrogate", None, {}) != fingerprint("ups.metrics", None, {})


def test_fingerprint_ignores_the_order_of_keys():
    """Inputs are a mapping: which comes first means nothing."""
    assert fingerprint("ups.surrogate.surrogate", None, {"a": 1, "b": 2}) == fingerprint(
        "ups.surrogate.surrogate", None, {"b": 2, "a": 1}
    )


OF_NO_STAGE = (
    "diffusion",
    "training/worker",
    "runs/launcher",
    "runs/torchrun",
    "runs/status",
    "runs/machine",
    "hooks",
    "runs/tracking",
    "runs/progress",
    "config/__init__",
    "config/launch",
    "config/sections",
    "config/training",
    "metrics/pdebench",
    "surrogate/surrogate",
    "evaluation/scores",
    "evaluation/external",
    "evaluation/corrector",
    "solvers/hyperbolic",
    "data/pdebench",
)


@pytest.mark.parametrize(
    ("edited", "trained_again"),
    [
        ("training/stages/codec", {"codec"}),
        ("training/stages/operator", {"operator"}),
        ("training/stages/diffusion", {"diffusion", "consistency"}),
        ("training/stages/consistency", {"consistency"}),
        ("training/stages/steady", {"steady"}),
        ("training/loop", set(STAGES)),
        ("training/update", set(STAGES)),
        ("training/batches", set(STAGES)),
        ("training/optimizers", set(STAGES)),
        ("models/codec", set(STAGES)),
        ("models/operator", {"operator", "diffusion", "consistency", "steady"}),
        ("models/backbone", {"operator", "diffusion", "consistency", "steady"}),
        ("models/denoiser", {"diffusion", "consistency"}),
        ("training/history", set(STAGES)),
    ],
)
def test_edit_reaches_its_stages_only(copy: Path, unedited: dict, edited: str, trained_again: set[str]):
    """An edit trains the stages that use the code again, and no other."""
    changed = changed_by([edited], copy, unedited)
    assert {stage for stage, modules in TRAINED_BY.items() if changed.intersection(modules)} == trained_again


def test_edit_of_other_code_trains_nothing(copy: Path, unedited: dict):
    """Entry points, launching, tracking, configuration types and evaluation are no part of a trained stage."""
    changed = changed_by(OF_NO_STAGE, copy, unedited)
    assert {stage for stage, modules in TRAINED_BY.items() if changed.intersection(modules)} == set()


OF_NO_SHARED_STEP = (
    "training/loop",
    "training/batches",
    "training/stages/operator",
    "training/worker",
    "runs/launcher",
    "runs/torchrun",
    "pipelines/evaluation",
)


@pytest.mark.parametrize(
    ("edited", "done_again"),
    [
        ("models/codec", {"latents", "scores", "corrector"}),
        ("data/encoding", {"latents", "scores", "corrector"}),
        ("evaluation/scores", {"scores", "corrector"}),
        ("evaluation/corrector", {"corrector"}),
        ("metrics/errors", {"scores", "corrector"}),
        ("surrogate/surrogate", {"scores", "corrector"}),
    ],
)
def test_edit_reaches_its_shared_steps_only(copy: Path, unedited: dict, edited: str, done_again: set[str]):
    """Latents, scores and corrector depend on the code that makes them."""
    changed = changed_by([edited], copy, unedited)
    assert {name for name, module in SHARED_BY.items() if module in changed} == done_again


def test_edit_of_training_reaches_no_shared_step(copy: Path, unedited: dict):
    """Latents, scores and corrector do not depend on the code of training or of starting jobs."""
    changed = changed_by(OF_NO_SHARED_STEP, copy, unedited)
    assert {name for name, module in SHARED_BY.items() if module in changed} == set()


class Place(BaseModel):
    """A section whose values JSON lacks."""

    folder: Path


def test_values_that_json_lacks(toy: Path):
    """A path counts as its text; NaN, which is not equal to itself, is refused."""
    module = f"{toy.name}.stage"
    one, other = (fingerprint(module, Place(folder=Path(name)), {}) for name in "ab")
    assert one != other
    with pytest.raises(ValueError, match="JSON compliant"):
        fingerprint(module, None, {"loss": float("nan")})
