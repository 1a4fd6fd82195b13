"""The identity of a step: its configuration, the receipts of its inputs and the code that does the work."""

import ast
import hashlib
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel

TYPES = "config"


def fingerprint(module: str, config: BaseModel | None, inputs: dict[str, Any], *also: str) -> str:
    """SHA-256 over the typed section, the receipts of the inputs and the code reachable from `module` and `also`."""
    section = config.model_dump(mode="json") if config is not None else None
    content = {"config": section, "inputs": inputs, "code": [code_digest(name) for name in (module, *also)]}
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


@cache
def code_digest(module: str) -> str:
    """SHA-256 of the syntax trees of `module` and of all it imports from its own package; prose does not count.

    The configuration's types are left out: its values are part of the fingerprint.
    """
    digest = hashlib.sha256()
    for name in sorted(name for name in _reachable(module) if not _is_type(name)):
        digest.update(f"{name}\n{ast.dump(_without_docstrings(_tree(name)))}\n".encode())
    return digest.hexdigest()


def _reachable(module: str) -> set[str]:
    found, open_names = set(), [module]
    while open_names:
        name = open_names.pop()
        if name not in found:
            found.add(name)
            open_names += _imports(name)
    return found


def _imports(module: str) -> list[str]:
    names = []
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [node.module, *submodules]
    return [name for name in names if _package(name) == _package(module) and _source(name) is not None]


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_type(module: str) -> bool:
    return module.split(".")[1:2] == [TYPES]


@cache
def _source(name: str) -> Path | None:
    """The file of a module, found without importing it; None for what a module merely contains."""
    root = find_spec(_package(name))
    assert root is not None and root.origin is not None, name
    place = Path(root.origin).parent.joinpath(*name.split(".")[1:])
    candidates = (place / "__init__.py", place.with_suffix(".py"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


@cache
def _tree(module: str) -> ast.Module:
    source = _source(module)
    assert source is not None, module
    return ast.parse(source.read_text(encoding="utf-8"))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [statement for statement in body if not _is_prose(statement)]
    return tree


def _is_prose(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
