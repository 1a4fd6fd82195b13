"""Catalog entries: folders that nodes fill themselves, and JSON files that are whole or absent."""

from pathlib import Path
from typing import Any, NoReturn

from kedro.io import AbstractDataset
from kedro_datasets._typing import JSONPreview

from ups.errors import ConfigFault
from ups.files import read_json, write_json

PREVIEW_CHARACTERS = 20_000


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


class JSON(AbstractDataset[Any, Any]):
    """A JSON file, written beside and renamed, so that a kill leaves the old one or the new one."""

    def __init__(self, filepath: str, metadata: dict[str, Any] | None = None) -> None:
        self._path, self.metadata = Path(filepath).resolve(), metadata

    def load(self) -> Any:
        return read_json(self._path)

    def save(self, data: Any) -> None:
        write_json(self._path, data)

    def preview(self) -> JSONPreview:
        """The beginning of the file, for Kedro-Viz."""
        return JSONPreview(self._path.read_text(encoding="utf-8")[:PREVIEW_CHARACTERS])

    def _exists(self) -> bool:
        return self._path.is_file()

    def _describe(self) -> dict[str, str]:
        return {"filepath": str(self._path)}
