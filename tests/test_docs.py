"""The documentation: its commands exist, its generated pages are complete, and it is built without a network."""

import html.parser
import json
import re
import shlex
import subprocess
import sys
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import yaml
from kedro.framework.cli.project import run as kedro_run
from kedro.pipeline import Pipeline
from pydantic import TypeAdapter

import ups
from notebooks import hooks, parameter_page
from tests.test_parameters import base, load
from tests.untrained import make_corrector, make_loadable
from ups.commands import _expect_parameters, _parameters, main
from ups.config import CorrectorConfig, Parameters, packaged
from ups.config.sections import Fraction, PerDimension, Seed
from ups.data import latent_cache
from ups.data.pdebench import FAMILIES
from ups.errors import ConfigFault
from ups.hooks import check_parameters
from ups.metrics import bootstrap
from ups.pipeline_registry import register_pipelines
from ups.session import check_names
from ups.surrogate import bundle, coverage

PROJECT = Path(__file__).parents[1]
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "notebooks").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(kedro run|ups|make)( |$)")
OPTIONS = re.compile(r"--(env|pipeline|params|nodes|from-nodes) |[a-z_]+(\.\w+)+=")  # parts of a `kedro run`
PLACEHOLDERS = {"N": "2", "HOST:PORT": "host:29500", "NAME": "sample"}
FILES = (".html", ".json", ".md", ".yml", ".csv", ".pt2", ".onnx", ".svg")


def written(text: str) -> tuple[list[str], list[str]]:
    """The lines of blocks of commands in a page, and its inline code."""
    blocks = [block.replace("\\\n", " ") for language, block in FENCE.findall(text) if language in ("", "bash")]
    inline = re.findall(r"`([^`]+)`", FENCE.sub("", text))
    return [line for block in blocks for line in block.splitlines()], [" ".join(code.split()) for code in inline]


@cache
def pipelines() -> dict[str, Pipeline]:
    """The pipelines by name."""
    return register_pipelines()


@cache
def commands(start: str) -> list[tuple[str, str]]:
    """The commands in all pages that start with a word, each with the first page that has it."""
    found: dict[str, str] = {}
    for page in PAGES:
        lines, inline = written(page.read_text(encoding="utf-8"))
        whole = [code for code in (*lines, *inline) if COMMAND.match(code)]
        whole += [f"kedro run {code}" for code in inline if code.startswith("--") and OPTIONS.match(code)]
        whole += [f"kedro run --params {code}" for code in inline if not code.startswith("--") and OPTIONS.match(code)]
        found = {code: page.name for code in whole if code.startswith(start)} | found
    return [(page, code) for code, page in found.items()]


def words_of(command: str) -> list[str]:
    """The words of a command, with values in place of what a reader has to fill in."""
    words = shlex.split(command, comments=True)
    filled = [re.sub(r"\b(HOST:PORT|N|NAME)\b", lambda found: PLACEHOLDERS[found[0]], word) for word in words]
    return [word.removeprefix("[").removesuffix("]") if word.startswith("[") else word for word in filled]


def check_kedro(command: str) -> None:
    """Refuse unknown options, environments, pipelines, nodes and parameters, and impossible values."""
    options = kedro_run.make_context("run", words_of(command)[2:]).params
    names = options["pipelines"] or ([options["pipeline"]] if options["pipeline"] else None)
    check_names(pipelines(), options | {"pipeline_names": names})
    environment = options["env"] or "base"
    assert (PROJECT / "conf" / environment).is_dir(), environment
    check_given(environment, json.dumps(options["params"]))


@cache
def check_given(environment: str, params: str) -> None:
    """Refuse an environment whose parameters, with those given as JSON, are wrong; pages repeat many of them."""
    check_parameters(load(environment, **json.loads(params)))


def check_ups(command: str) -> None:
    """Refuse unknown commands and options of `ups`; a command may be named without its arguments."""
    _, name, *arguments = words_of(command)
    if name == "--help":
        return
    try:
        context = main.commands[name].make_context(name, arguments)
    except (click.exceptions.Exit, click.MissingParameter):
        return
    except click.BadOptionUsage as error:
        assert error.option_name in {option for each in main.commands[name].params for option in each.opts}
        return
    _expect_parameters(_parameters(context.args), {name for each in FAMILIES.values() for name in each.parameters})


@pytest.mark.parametrize(("page", "command"), commands("kedro run"))
def test_commands_of_kedro_exist(page: str, command: str, monkeypatch: pytest.MonkeyPatch):
    """Each `kedro run` in README and pages is accepted up to the first step."""
    monkeypatch.setenv("UPS_SAMPLE_DATA", "folder")
    check_kedro(command)


@pytest.mark.parametrize(("page", "command"), commands("ups "))
def test_commands_of_ups_exist(page: str, command: str):
    """Each `ups` command in README and pages is one with such options."""
    check_ups(command)


def test_targets_of_make_exist():
    """Each `make` in README and pages has its target."""
    targets = re.findall(r"^([\w-]+):", (PROJECT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = {words_of(command)[1] for _, command in commands("make ")}
    assert {"run", "docs"} <= named <= set(targets)


@pytest.mark.parametrize(
    "command",
    [
        "kedro run --pipeline tuning",
        "kedro run --env gpu",
        "kedro run --params operator.step=8000",
        "kedro run --params operator.steps=many",
        "kedro run --nodes train_operators",
        "kedro run --parameters operator.steps=8000",
        "ups predict IN OUT --family burgers_1d --step 20",
        "ups infos",
        "ups export data OUT --format onxx",
    ],
)
def test_wrong_commands_are_found(command: str):
    """A misspelt option, environment, pipeline, node, parameter, value or command fails the checks above."""
    check = check_kedro if command.startswith("kedro") else check_ups
    with pytest.raises((ConfigFault, AssertionError, click.UsageError, click.exceptions.Exit, KeyError)):
        check(command)


FAMILIES_ON_PAGES = ("burgers_1d", "darcy_2d", "diffusion_sorption_1d", "shallow_water_2d")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data root `data`, whose models have random weights."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "data").mkdir()
    make_loadable(folder / "data", FAMILIES_ON_PAGES, count=5)
    how = {"mode": "sample", "sigma": 5.0, "sigma_min": 0.02, "num_steps": 1, "residual_scale": 1.0}
    chosen = {"diffusion_sorption_1d": {"consistency": how | {"noise_correlation": 0.0}}}
    make_corrector(folder / "data", chosen)
    return folder


@pytest.mark.parametrize(
    ("page", "given"),
    [
        ("predict", {"u_0": (8,), "a": (8, 6), "h_0": (8, 6)}),
        ("adapt", {"u_0": (8,), "u": (4, 5, 1, 8)}),
        ("your_equation", {"u": (3, 5, 8)}),
    ],
)
def test_python_on_the_pages_runs(page: str, given: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The blocks of Python of a page, one after the other, with fewer steps, and with arrays that a reader has."""
    monkeypatch.chdir(folder)
    generator, text = np.random.default_rng(0), (PROJECT / f"notebooks/{page}.md").read_text(encoding="utf-8")
    known: dict[str, Any] = {name: generator.uniform(0.5, 1.5, shape) for name, shape in given.items()}
    known |= {"ups": ups, "x": (np.arange(8) + 0.5) / 8}
    blocks = [block for language, block in FENCE.findall(text) if language == "python"]
    assert blocks != []
    with warnings.catch_warnings():
        for block in blocks:
            exec(re.sub(r"steps=\d+", "steps=2", block), known)


def test_parameters_in_files_are_valid():
    """Each block of YAML that sets parameters is accepted, as part of a file of an environment."""
    blocks = [block for page in PAGES for language, block in FENCE.findall(page.read_text()) if language == "yaml"]
    contents = [content for content in map(yaml.safe_load, blocks) if content.keys() <= Parameters.model_fields.keys()]
    assert contents != []
    for content in contents:
        check_parameters(load("base", **content))


def test_named_parameters_exist():
    """A parameter that a page names without a value, such as `launch.restarts`, is one of the configuration."""
    sections = "|".join(Parameters.model_fields)
    for page in PAGES:
        for code in written(page.read_text(encoding="utf-8"))[1]:
            if re.fullmatch(rf"({sections})(\.\w+)+", code) and not code.endswith(FILES):
                value: Any = base()
                for part in code.split("."):
                    assert part in value, f"{page.name}: {code}"
                    value = value[part]


def paths(section: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of all values in nested sections."""
    found = []
    for name, value in section.items():
        found += paths(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [f"{prefix}{name}"]
    return [path for path in found if not path.startswith("_")]


def test_every_parameter_is_explained_once():
    """Each value of `conf/base` belongs to exactly one line of the page, which has default, type and meaning."""
    lines = re.findall(r"^\| `([\w.]+)` \| (.+) \| (.+) \| (.+) \|$", parameter_page.parameters_page(), re.MULTILINE)
    rows, expected = [name for name, *_ in lines], paths(base())
    assert len(rows) == len(set(rows)) > 300
    for path in expected:
        assert [row for row in rows if path == row or path.startswith(f"{row}.")] != [], path
    assert all(any(path == row or path.startswith(f"{row}.") for path in expected) for row in rows)
    defaults = {name: default for name, default, *_ in lines}
    assert (defaults["operator.steps"], defaults["launch.num_processes"]) == ("`6500`", "`1`")
    assert [name for name, *_, meaning in lines if "see [" in meaning] == []


def test_comments_belong_to_their_line():
    """A comment above, at the end of a line or continued below it; keys of an alias have those of its anchor."""
    text = "_a: &a\n  # above\n  x: 1  # end\n        # more\n  y: 2\nb:  # whole\n  <<: *a\n  z: {v: 3}  # flow\n"
    found = parameter_page.places(yaml.compose(text, Loader=yaml.SafeLoader), "")
    comments = {name: parameter_page.comment_at(text.splitlines(), line) for name, line, _ in found}
    assert comments == {
        "_a": "", "_a.x": "above end more", "_a.y": "", "b": "whole", "b.x": "above end more", "b.y": "", "b.z": "flow",
        "b.z.v": "flow",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Fraction, "number > 0, < 1"),
        (Seed | None, "integer ≥ 0 or null"),
        (PerDimension, "3 integers > 0"),
        (dict[str, float], "number by name"),
        (list[str], "list of texts"),
    ],
)
def test_types_in_words(kind: Any, text: str):
    """Bounds, lists and null are named."""
    assert parameter_page.words(TypeAdapter(kind).json_schema()) == text


@pytest.mark.parametrize("name", hooks.NOTEBOOKS)
def test_notebooks_keep_their_outputs(name: str):
    """The page of a notebook has the text of all cells and all its figures."""
    cells = json.loads((PROJECT / f"notebooks/{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    page = hooks.notebook_page(name)
    assert all("".join(cell["source"]) in page for cell in cells)
    figures = [o for cell in cells for o in cell.get("outputs", ()) if "image/png" in o.get("data", {})]
    assert page.count("data:image/png;base64,") == len(figures) > 0


def test_numbers_on_the_pages_are_those_of_the_code():
    """Limits, constants and the format of bundles that the pages name."""
    method, formats = ((PROJECT / f"notebooks/{name}.md").read_text(encoding="utf-8") for name in ("method", "formats"))
    limits = CorrectorConfig.model_validate(packaged("corrector"))
    assert limits.max_nrmse == limits.max_high_band and limits.min_trajectories == 8
    assert f"at most {limits.max_crps:g} times the MAE" in method
    assert f"at most {limits.max_nrmse:g} times" in method
    assert f"between 1/{limits.max_miscalibration:g} and {limits.max_miscalibration:g}" in method
    assert f"fewer than {bootstrap.MIN_TRAJECTORIES} trajectories" in method.replace("\n", " ")
    assert f"resampled: {bootstrap.NUM_RESAMPLES} times" in method.replace("\n", " ")
    assert f"> {coverage.WARNING:g} \\cdot" in method and f"clamped to {latent_cache.MARGIN:g} times" in method
    assert f"`format` ({bundle.FORMAT})" in formats


def anchors_of(page: str) -> set[str]:
    """The anchors of the headings of a page: given ones, or those that MkDocs makes of the words."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", page), re.MULTILINE):
        given = re.search(r"\{ #(\S+) \}$", heading)
        words = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
        found.add(given[1] if given else re.sub(r"[\s-]+", "-", words))
    return found


def test_links_on_the_pages_lead_to_pages_of_the_site():
    """Each link in a page, in those made from README, configuration and tables too, to a page of it and its anchors."""
    pages = {path.name: path.read_text(encoding="utf-8") for path in PAGES[1:]}
    pages |= {page: hooks.text_page(Path(source)) for source, page in hooks.TEXTS.items()}
    pages |= {f"{name}.md": hooks.notebook_page(name) for name in hooks.NOTEBOOKS}
    pages["results.md"] += hooks.published_tables()
    pages["parameters.md"] = parameter_page.parameters_page()
    api = {f"api/{path.name}" for path in (PROJECT / "notebooks/api").glob("*.md")}
    figures = {path.name for path in (PROJECT / hooks.PUBLISHED).glob("*/*.svg")}
    anchors, num_links = {name: anchors_of(text) for name, text in pages.items()}, 0
    for name, text in pages.items():
        prose = re.sub(r"`[^`]*`", "", FENCE.sub("", text))
        for target, anchor in re.findall(r"\]\((?!https?:|data:)([^)\s#]*)#?([^)\s]*)\)", prose):
            assert target in {"", *pages, *api, *figures}, f"{name}: {target}"
            assert not anchor or anchor in anchors[target or name], f"{name}: {target}#{anchor}"
            num_links += 1
    assert num_links > 100


class Loaded(html.parser.HTMLParser):
    """Addresses from which a page loads something by itself; links that a reader follows are none."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note `src`, `srcset`, `data` and the `href` of everything but links."""
        names = ("src", "srcset", "data", "poster") + (() if tag == "a" else ("href",))
        self.addresses += [value or "" for name, value in attributes if name in names]


@pytest.mark.slow
def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path):
    """No broken link, no formula left as text, and neither pages nor styles name another host to load from."""
    if find_spec("mkdocs") is None:
        pytest.skip("needs the extra `docs`")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text, loaded = page.read_text(encoding="utf-8"), Loaded()
        loaded.feed(text)
        assert [each for each in loaded.addresses if re.match(r"(https?:)?//", each)] == [], page
        local = [each.partition("?")[0].lstrip("/") for each in loaded.addresses if not each.startswith("data:")]
        assert [each for each in local if not (page.parent / each).is_file()] == [], page
        assert "arithmatex" not in text
    assert (tmp_path / "method.html").read_text(encoding="utf-8").count("<math") > 50
    for style in tmp_path.rglob("*.css"):
        assert re.findall(r"url\(['\"]?(?:https?:)?//|@import", style.read_text(encoding="utf-8")) == [], style
