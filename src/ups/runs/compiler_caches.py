"""Folders for the code that torch compiles in jobs: private, and without what a killed compilation has left in them."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ups.files import private_folder

COMPILED = ".compiled"
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
BUILD = ".main_CxxBuild"  # ends the folder in which a library of the name before it is built


def compiler_caches(data_root: Path) -> dict[str, str]:
    """Environment variables that name the caches below the data root, without those that are set already.

    Torch would keep compiled code in the shared temporary folder, where another user could plant an entry.
    """
    variables = {}
    for name, folder in CACHES.items():
        if name not in os.environ:
            cache = data_root / COMPILED / folder
            for private in (cache.parent, cache):
                private_folder(private)
            variables[name] = str(cache)
    remove_unfinished(Path((os.environ | variables)["TORCHINDUCTOR_CACHE_DIR"]))
    return variables


def remove_unfinished(cache: Path) -> None:
    """Remove libraries that were not written to their end, because a job was killed: torch would load them for ever.

    `torch._inductor` writes KEY.main.so under its final name, beside a folder that it removes afterwards, and holds the
    lock KEY.lock meanwhile: what another job builds at this moment stays.
    """
    for folder in cache.glob(f"*/*{BUILD}"):
        key = folder.name.removesuffix(BUILD)
        with suppress(Timeout, PermissionError), FileLock(cache / "locks" / f"{key}.lock", timeout=0):
            if folder.is_dir():  # it may have been finished just now
                folder.with_name(f"{key}.main.so").unlink(missing_ok=True)
                shutil.rmtree(folder)
