"""The shape of the source: layers, sizes, words."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ups"
MAX_LINES = 300


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax tree of every module, by its path."""
    return {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def nodes(kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Every node of one kind with its place, `path:line`."""
    for path, tree in modules().items():
        yield from ((f"{path}:{node.lineno}", node) for node in ast.walk(tree) if isinstance(node, kind))


def test_imports_point_down():
    """Every contract of import-linter in `pyproject.toml` holds."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    assert ", 0 broken" in result.stdout


def test_modules_are_short():
    """A file can be read at one sitting."""
    assert len(modules()) > 50
    assert [path for path in modules() if len((SOURCE / path).read_text().splitlines()) > MAX_LINES] == []


def test_modules_say_what_they_are():
    """Every module has a docstring."""
    assert [path for path, tree in modules().items() if ast.get_docstring(tree) is None] == []


def test_public_names_say_what_they_are():
    """Every public class and function of a module has a docstring."""
    defined = [(path, node) for path, tree in modules().items() for node in tree.body if hasattr(node, "name")]
    silent = [f"{path}:{node.name}" for path, node in defined if ast.get_docstring(node) is None]
    assert [place for place in silent if ":_" not in place] == []


def test_nothing_is_printed():
    """Messages are logged."""
    assert [place for place, call in nodes(ast.Call) if ast.unparse(call.func) == "print"] == []


def test_no_handler_catches_everything():
    """Only errors that can be repaired are caught, by their narrow type."""
    assert [place for place, handler in nodes(ast.ExceptHandler) if _is_broad(handler.type)] == []


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(_is_broad(element) for element in caught.elts)
    return caught is None or ast.unparse(caught) in ("Exception", "BaseException")


def test_fingerprints_see_every_import():
    """Imports are absolute, for the code digest follows no others; Kedro's shell has no digest."""
    relative = [place for place, statement in nodes(ast.ImportFrom) if statement.level > 0]
    assert [place for place in relative if not place.startswith("pipelines/")] == []
