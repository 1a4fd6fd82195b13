"""Catalog entries that are folders: a node gets the path and fills or reads it."""

from pathlib import Path
from typing import Any, NoReturn

from kedro.io import AbstractDataset

from ups.errors import ConfigFault


class Directory(AbstractDataset[None, Path]):
    """A folder; loading gives its absolute path, and makes it unless `create` is false."""

    def __init__(self, filepath: str, create: bool = True, metadata: dict[str, Any] | None = None) -> None:
        self._path, self._create, self.metadata = Path(filepath).resolve(), create, metadata

    def load(self) -> Path:
        if self._create:
            self._path.mkdir(parents=True, exist_ok=True)
        return self._path

    def save(self, data: None) -> NoReturn:
        raise ConfigFault(f"{self._path} is a folder that nodes fill themselves; no node may return it")

    def _exists(self) -> bool:
        return self._path.is_dir()

    def _describe(self) -> dict[str, str]:
        return {"path": str(self._path)}
