"""Dataset types of the catalog: files that are replaced atomically, with previews for Kedro-Viz.

kedro-datasets writes in place: a kill leaves half a file under its final name. Only reports that no node reads and the
next run overwrites (Matplotlib figures, traces) use it; all other files are written by `ups.files.publish`. Besides,
kedro-datasets has no optional files, and no previews of long JSON lists, records, Markdown and several images.

Kedro-Viz chooses how to show a preview by the name of the type that `preview` returns; kedro-datasets has these names
in a private module only.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any, NewType

from kedro.io import AbstractDataset
from kedro_datasets.json import JSONDataset
from kedro_datasets.text import TextDataset

from ups.files import place_of, publish, read_json, write_json

HTMLPreview = NewType("HTMLPreview", str)
JSONPreview = NewType("JSONPreview", str)
TablePreview = NewType("TablePreview", dict)

MAX_ROWS, MAX_ITEMS, MAX_PAGES, COLOURS = 400, 20, 12, 256  # of previews
MEBIBYTE = 2**20
LINE_SEPARATOR = "\u2028"


class JSON(JSONDataset):
    """A JSON file, replaced atomically, with a preview that cuts long lists.

    An `optional` file may be missing: loading then gives None, and saving nothing, such as an empty list, leaves the
    file as it was.
    """

    def __init__(self, *, optional: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._optional = optional

    def load(self) -> Any:
        return None if self._optional and not self._exists() else read_json(Path(self._get_load_path()))

    def save(self, data: Any) -> None:
        if data or not self._optional:
            write_json(Path(self._get_save_path()), data)

    def preview(self) -> JSONPreview:
        """The content with long lists cut short."""
        return JSONPreview(json.dumps(_shortened(self.load())))


class Records(JSON):
    """A JSON file with a list of records, for example one per score, with a preview as a table."""

    def preview(self) -> TablePreview:
        """A row per record; lists, such as the errors of single trajectories, are left out."""
        rows = self.load() or []
        columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list)))
        return _table(columns, [[_cell(row.get(column, "")) for column in columns] for row in rows])


class LatentCacheReceipt(JSON):
    """The receipt of a latent cache, with a preview of the cache itself."""

    def __init__(self, *, data_root: str, **options: Any) -> None:
        super().__init__(**options)
        self._data_root = Path(data_root).resolve()

    def preview(self) -> TablePreview:
        """Shape and size of the latents of each dataset."""
        from ups.data.latent_cache import MANIFEST

        folder = place_of(self._data_root, self.load())
        manifest = read_json(folder / MANIFEST)
        rows = []
        for name, entry in manifest["datasets"].items():
            for kind, array in entry["arrays"].items():
                num_bytes = sum(
                    path.stat().st_size for path in (folder / f"{name}.zarr" / kind).rglob("*") if path.is_file()
                )
                rows.append([name, kind, *array["shape"], round(num_bytes / MEBIBYTE, 3)])
        return _table(["dataset", "kind", "trajectories", "snapshots", "tokens", "channels", "MiB on disk"], rows)


class Text(TextDataset):
    """A text file, such as an HTML page, replaced atomically.

    An `optional` file may be missing: loading then gives None; saving no text leaves the file as it was.
    """

    def __init__(self, *, optional: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._optional = optional

    @property
    def path(self) -> Path:
        """Where the file is, or will be."""
        return Path(self._get_load_path())

    def load(self) -> str | None:
        return None if self._optional and not self.path.is_file() else self.path.read_text(encoding="utf-8")

    def save(self, data: str) -> None:
        if self._optional and not data:
            return
        with publish(Path(self._get_save_path())) as temporary:
            temporary.write_text(data, encoding="utf-8")


class Markdown(Text):
    """A Markdown file, replaced atomically, with a preview as HTML."""

    def preview(self) -> HTMLPreview:
        """The text as HTML."""
        from markdown_it import MarkdownIt

        # Kedro-Viz reads the HTML as Markdown once more: line breaks would become `<br>`, and two underscores emphasis,
        # which a line separator (shown as a space) prevents.
        html = MarkdownIt("commonmark", {"html": False}).enable("table").render(self.load() or "")
        return HTMLPreview(html.replace("\n", " ").replace("_", f"_{LINE_SEPARATOR}"))


class Pages(AbstractDataset[dict[str, bytes], dict[str, bytes]]):
    """A folder of PNG pages by file name; saving replaces all of them, each page atomically.

    `MatplotlibDataset` writes a dictionary of figures as well, but keeps those of datasets that are gone, and cannot be
    loaded. Saving no page leaves an `optional` folder as it was.
    """

    def __init__(self, filepath: str, metadata: dict[str, Any] | None = None, *, optional: bool = False) -> None:
        self._path, self.metadata, self._optional = Path(filepath).resolve(), metadata, optional

    def load(self) -> dict[str, bytes]:
        return pages_in(self._path)

    def save(self, data: dict[str, bytes]) -> None:
        if self._optional and not data:
            return
        present = self.load()
        for name in present.keys() - data.keys():
            (self._path / name).unlink()
        for name, page in data.items():
            if present.get(name) != page:
                with publish(self._path / name) as temporary:
                    temporary.write_bytes(page)

    def preview(self) -> HTMLPreview:
        """The first pages below one another at full size, in few colours."""
        return HTMLPreview("\n".join(_image(page) for page in list(self.load().values())[:MAX_PAGES]))

    def _exists(self) -> bool:
        return any(self._path.glob("*.png"))

    def _describe(self) -> dict[str, str]:
        return {"path": str(self._path)}


def pages_in(folder: Path) -> dict[str, bytes]:
    """The PNG pages in a folder by file name, in order."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.png"))}


def _table(columns: list[str], rows: list[list[Any]]) -> TablePreview:
    return TablePreview({"index": list(range(len(rows[:MAX_ROWS]))), "columns": columns, "data": rows[:MAX_ROWS]})


def _cell(value: Any) -> Any:
    """A number with four digits, a dictionary as text."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return json.dumps(value) if isinstance(value, dict) else value


def _image(page: bytes) -> str:
    """A PNG as an element of HTML."""
    from PIL import Image

    buffer = io.BytesIO()
    small = Image.open(io.BytesIO(page)).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE)
    small.save(buffer, "PNG", optimize=True)
    return f'<img width="100%" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


def _shortened(content: Any) -> Any:
    """JSON whose lists have at most `MAX_ITEMS` items and a note on the number of the others."""
    if isinstance(content, dict):
        return {key: _shortened(value) for key, value in content.items()}
    if isinstance(content, list):
        rest = [f"... and {len(content) - MAX_ITEMS} more"] * (len(content) > MAX_ITEMS)
        return [_shortened(item) for item in content[:MAX_ITEMS]] + rest
    return content
