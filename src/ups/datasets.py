"""Catalog entries: folders that nodes fill themselves, and files that are whole or absent, with previews of them."""

import base64
import io
import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from kedro.io import AbstractDataset
from kedro_datasets._typing import HTMLPreview, JSONPreview, TablePreview

from ups.errors import ConfigFault
from ups.files import publish, read_json, write_json

MAX_ROWS, MAX_ITEMS, MAX_PAGES, COLOURS = 400, 20, 12, 256  # of previews
MEBIBYTE = 2**20


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

    def preview(self) -> TablePreview:
        """Names and sizes of the files, for Kedro-Viz."""
        paths = sorted(path for path in self._path.glob("[!.]*") if path.is_file())
        rows = [[path.name, round(path.stat().st_size / MEBIBYTE, 3)] for path in paths]
        return _table(["file", "MiB"], rows)

    def _exists(self) -> bool:
        return self._path.is_dir()

    def _describe(self) -> dict[str, str]:
        return {"path": str(self._path)}


class _JSONFile(AbstractDataset[Any, Any]):
    """A JSON file, written beside and renamed, so that a kill leaves the old one or the new one.

    Where it is missing, loading gives None if it is `optional`.
    """

    def __init__(self, filepath: str, optional: bool = False, metadata: dict[str, Any] | None = None) -> None:
        self._path, self._optional, self.metadata = Path(filepath).resolve(), optional, metadata

    def load(self) -> Any:
        return None if self._optional and not self._exists() else read_json(self._path)

    def save(self, data: Any) -> None:
        write_json(self._path, data)

    def _exists(self) -> bool:
        return self._path.is_file()

    def _describe(self) -> dict[str, str]:
        return {"filepath": str(self._path)}


class JSON(_JSONFile):
    """A JSON file that shows itself."""

    def preview(self) -> JSONPreview:
        """The content with long lists cut short, for Kedro-Viz."""
        return JSONPreview(json.dumps(_shortened(self.load())))


class LatentCacheReceipt(_JSONFile):
    """The receipt of the latent cache, which shows the cache."""

    def __init__(self, filepath: str, data_root: str, metadata: dict[str, Any] | None = None) -> None:
        super().__init__(filepath, metadata=metadata)
        self._data_root = Path(data_root).resolve()

    def preview(self) -> TablePreview:
        """Shape and size of the latents of each dataset, for Kedro-Viz."""
        from ups.data.latent_cache import MANIFEST

        manifest = read_json(self._data_root / self.load()["path"] / MANIFEST)
        arrays = [(name, *item) for name, entry in manifest["datasets"].items() for item in entry["arrays"].items()]
        rows = []
        for name, kind, array in arrays:
            num_bytes = int(np.prod(array["shape"])) * np.dtype(array["dtype"]).itemsize
            rows.append([name, kind, *array["shape"], round(num_bytes / MEBIBYTE, 3), array["dtype"]])
        return _table(
            ["dataset", "kind", "trajectories", "snapshots", "tokens", "channels", "MiB", "dtype"],
            rows,
        )


class Pages(AbstractDataset[dict[str, bytes], dict[str, bytes]]):
    """A folder of PNG pages by file name; saving replaces all, each page is the old one or the new one."""

    def __init__(self, filepath: str, metadata: dict[str, Any] | None = None) -> None:
        self._path, self.metadata = Path(filepath).resolve(), metadata

    def load(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self._path.glob("*.png"))}

    def save(self, data: dict[str, bytes]) -> None:
        present = self.load()
        for name in present.keys() - data.keys():
            (self._path / name).unlink()
        for name, page in data.items():
            if present.get(name) != page:
                with publish(self._path / name) as temporary:
                    temporary.write_bytes(page)

    def preview(self) -> HTMLPreview:
        """The first pages below one another at full size, in few colours, for Kedro-Viz."""
        pages = [_image(page) for page in list(self.load().values())[:MAX_PAGES]]
        return HTMLPreview("\n".join(pages))

    def _exists(self) -> bool:
        return any(self._path.glob("*.png"))

    def _describe(self) -> dict[str, str]:
        return {"path": str(self._path)}


class Markdown(AbstractDataset[str, str]):
    """A text, written beside and renamed."""

    def __init__(self, filepath: str, metadata: dict[str, Any] | None = None) -> None:
        self._path, self.metadata = Path(filepath).resolve(), metadata

    def load(self) -> str:
        return self._path.read_text(encoding="utf-8")

    def save(self, data: str) -> None:
        with publish(self._path) as temporary:
            temporary.write_text(data, encoding="utf-8")

    def _exists(self) -> bool:
        return self._path.is_file()

    def _describe(self) -> dict[str, str]:
        return {"filepath": str(self._path)}


def _table(columns: list[str], rows: list[list[Any]]) -> TablePreview:
    return TablePreview({"index": list(range(len(rows[:MAX_ROWS]))), "columns": columns, "data": rows[:MAX_ROWS]})


def _image(page: bytes) -> str:
    """A PNG as an element of HTML."""
    from PIL import Image

    buffer = io.BytesIO()
    small = Image.open(io.BytesIO(page)).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE)
    small.save(buffer, "PNG", optimize=True)
    return f'<img width="100%" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


def _shortened(content: Any) -> Any:
    """JSON whose lists have at most `MAX_ITEMS` items and a word on the rest."""
    if isinstance(content, dict):
        return {key: _shortened(value) for key, value in content.items()}
    if isinstance(content, list):
        rest = [f"... and {len(content) - MAX_ITEMS} more"] * (len(content) > MAX_ITEMS)
        return [_shortened(item) for item in content[:MAX_ITEMS]] + rest
    return content
