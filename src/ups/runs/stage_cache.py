"""Stage cache: a step is done once per key (its configuration, the receipts of its inputs and its code).

A step's folder holds its files and, written last, its receipt: a small JSON file with step, key and result.
"""

import ast
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from filelock import Timeout
from pydantic import BaseModel

from ups.errors import DataFault, Locked
from ups.files import plain, private_lock, read_json, storage_faults, write_json

if TYPE_CHECKING:
    from grimp import ImportGraph

log = logging.getLogger(__name__)

RECEIPT, SIZES, LOCK = "receipt.json", "files", ".lock"
Receipt = dict[str, Any]

# Configuration types and the table of families are data: their values are in the receipts and in the configuration.
NOT_CODE = re.compile(r"\w+\.(config|data\.pdebench)(\.|$)")
_parsing = Lock()  # of threads that build syntax trees at the same time CPython 3.11 fails with a SystemError


def fingerprint(module: str, config: BaseModel | None, inputs: dict[str, Any], *also: str) -> str:
    """SHA-256 over the typed section, the receipts of the inputs and the code reachable from `module` and `also`."""
    section = config.model_dump(mode="json") if config is not None else None
    content = {"config": section, "inputs": inputs, "code": [code_digest(name) for name in (module, *also)]}
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


@cache
def code_digest(module: str) -> str:
    """SHA-256 of the syntax trees of `module` and all modules of its package that it imports, directly or indirectly.

    An import inside a function counts. Comments, docstrings and line breaks do not, nor do the modules in NOT_CODE.
    A package's `__init__` counts where a name is imported from it, not where it merely contains a module.
    """
    digest = hashlib.sha256()
    with _parsing:
        names = _import_graph(module.partition(".")[0]).find_upstream_modules(module) | {module}
        for name in sorted(name for name in names if not NOT_CODE.match(name)):
            digest.update(f"{name}\n{_code(name)}\n".encode())
    return digest.hexdigest()


@cache
def _import_graph(package: str) -> "ImportGraph":
    """Which module imports which, read from the source: no module is executed."""
    import grimp  # a command without cached steps does not need it

    return grimp.build_graph(package, cache_dir=None)


@cache
def _code(module: str) -> str:
    """The syntax tree of a module without docstrings, as text."""
    package = find_spec(module.partition(".")[0])  # imports nothing, unlike the look-up of a module in a package
    assert package is not None and package.origin is not None, module
    path = Path(package.origin).parent.joinpath(*module.split(".")[1:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [statement for statement in body if not _is_docstring(statement)]
    return ast.dump(tree)


def _is_docstring(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def cached_step(
    name: str, folder: Path, key: str, work: Callable[[Path], Receipt], *, root: Path, force: bool = False
) -> Receipt:
    """The receipt of step `name`: the stored one if its files are complete and not `force`, else that of `work`.

    The step's folder, the argument of `work`, is `folder/<first 12 digits of key>`. An interrupted `work` finds there
    what it has written before and may resume from it, whether it was forced or not. The receipt adds to the result of
    `work`: path relative to `root` and fingerprint. The file on disk also lists the sizes of all files; the returned
    receipt does not, because the length of a log varies and would change the keys of the steps that follow.

    Raises:
        Locked: another process works in the same folder.
        StorageFault: the folder cannot be written to.
    """
    step_folder = folder / key[:12]
    described = {"step": name, "fingerprint": key, "path": str(step_folder.relative_to(root))}
    with storage_faults(step_folder):
        step_folder.mkdir(parents=True, exist_ok=True)
    with _lock(name, step_folder):
        if force and (step_folder / RECEIPT).is_file():
            _empty(step_folder)
        elif (stored := _stored_receipt(step_folder, described)) is not None:
            log.info("%s: up to date (%s)", name, key[:12])
            return stored
        log.info("%s: running (%s)", name, key[:12])
        started = time.monotonic()
        result = work(step_folder)
        assert SIZES not in result, name
        receipt = described | result
        write_json(step_folder / RECEIPT, receipt | {SIZES: _file_sizes(step_folder)})
        log.info("%s: done in %.0f s", name, time.monotonic() - started)
        return _without_sizes(read_json(step_folder / RECEIPT))


def untrained_receipt(stage: str, reason: str) -> Receipt:
    """The receipt of a stage that was not trained, and why."""
    return {"stage": stage, "untrained": reason}


def trained_receipts(receipts: dict[str, Receipt]) -> dict[str, Receipt]:
    """The receipts without those of stages that had no datasets to train on."""
    return {name: receipt for name, receipt in receipts.items() if "untrained" not in receipt}


def _stored_receipt(step_folder: Path, described: Receipt) -> Receipt | None:
    """The receipt of a finished step; None, and an empty folder, if a file is missing or of another size.

    Raises:
        DataFault: the file is not the receipt of this step, which is `described`.
    """
    if not (step_folder / RECEIPT).is_file():
        return None
    receipt = read_json(step_folder / RECEIPT)
    if not isinstance(receipt, dict) or not isinstance(receipt.get(SIZES), dict) or receipt != receipt | described:
        raise DataFault(f"{step_folder / RECEIPT} is not the receipt of this step; delete {step_folder} and run again")
    present = _file_sizes(step_folder)
    changed = [name for name, size in receipt[SIZES].items() if present.get(name) != size]
    if changed:
        log.warning("%s: missing or of another size: %s; the step is done again", step_folder, ", ".join(changed[:3]))
        _empty(step_folder)
        return None
    return _without_sizes(receipt)


def _without_sizes(receipt: Receipt) -> Receipt:
    return {key: value for key, value in receipt.items() if key != SIZES}


def _empty(step_folder: Path) -> None:
    for path in step_folder.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _file_sizes(step_folder: Path) -> dict[str, int]:
    paths = (path for path in sorted(step_folder.rglob("*")) if path.name not in (LOCK, RECEIPT))
    files = (path for path in paths if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(step_folder)): path.stat().st_size for path in files}


@contextmanager
def _lock(name: str, step_folder: Path) -> Iterator[None]:
    path = step_folder / LOCK
    try:
        with storage_faults(path):
            lock = private_lock(path, timeout=0).acquire()
    except Timeout:
        holder = path.read_text(encoding="utf-8").strip() or "unknown"
        raise Locked(
            f"{name}: process {holder} works in {step_folder}; wait for it or stop it, then run again"
        ) from None
    with lock:
        with open(path, "w", encoding="utf-8", opener=plain) as file:
            file.write(str(os.getpid()))
        yield
