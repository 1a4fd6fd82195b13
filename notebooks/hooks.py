"""Pages of the documentation that are made while it is built (`make docs`), by hooks of MkDocs: see `mkdocs.yml`.

Notebooks are shown with the outputs that they hold; README, SECURITY and the published tables are the files of these
names. `parameter_page` makes the page of the parameters.
"""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ("quickstart", "own_equation", "inverse_problem")
PUBLISHED = Path("data/published")
TEXTS = {"README.md": "readme.md", "SECURITY.md": "security.md", f"{PUBLISHED}/README.md": "results.md"}
LOCAL_LINK = re.compile(r"\]\((?!https?:|#|data:)([^)\s#]+)(#[^)\s]*)?\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: "MkDocsConfig") -> None:
    """In docstrings and pages (B, C, *grid) is a shape, not emphasis, and <e_k> a mean, not an element of HTML."""
    import markdown

    class Formulas(markdown.extensions.Extension):
        def extendMarkdown(self, md: markdown.Markdown) -> None:  # noqa: N802
            shapes = markdown.inlinepatterns.SimpleTextInlineProcessor(r"(?<=[ (])(\*[\w.]*)(?=[,)])")
            md.inlinePatterns.register(shapes, "shapes", 185)
            md.inlinePatterns.deregister("html")

    config.markdown_extensions.append(Formulas())


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the pages for which there is no Markdown file in this folder."""
    from mkdocs.structure.files import File, Files
    from pygments.formatters import HtmlFormatter

    made = {f"{name}.md": notebook_page(name) for name in NOTEBOOKS}
    made |= {page: text_page(Path(source)) for source, page in TEXTS.items()}
    made["results.md"] += published_tables()
    made |= {path.name: path.read_text(encoding="utf-8") for path in (ROOT / PUBLISHED).glob("*/*.svg")}
    made["pygments.css"] = HtmlFormatter().get_style_defs(".highlight")
    return Files([*files, *(File.generated(config, name, content=text) for name, text in made.items())])


def on_page_content(content: str, **_: Any) -> str:
    """Formulas, which `pymdownx.arithmatex` has found, as MathML, which browsers show without any script."""
    from latex2mathml.converter import convert

    display = {"span": "inline", "div": "block"}
    return FORMULA.sub(lambda found: convert(html.unescape(found[2]), display=display[found[1]]), content)


def text_page(source: Path) -> str:
    """A Markdown file of the repository; its links lead to pages of the site that show the same."""

    def target(found: re.Match[str]) -> str:
        place = source.parent / found[1]
        inside = place.name if place.suffix == ".svg" else f"results.md#{place.parent.name}-{place.stem}"
        known = TEXTS | {"notebooks": "quickstart.md"}
        page = known.get(str(place), inside if place.is_relative_to(PUBLISHED) else None)
        return f"]({page or place.relative_to('notebooks').with_suffix('.md')}{found[2] or ''})"

    return LOCAL_LINK.sub(target, (ROOT / source).read_text(encoding="utf-8"))


def published_tables() -> str:
    """The tables in the folders of `data/published`, each with a heading of its own."""
    text = ""
    for path in sorted((ROOT / PUBLISHED).glob("*/*.md")):
        table = re.sub(r"^#+ (.*)$", r"**\1**", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        text += f"\n\n## `{path.parent.name}/{path.name}` {{ #{path.parent.name}-{path.stem} }}\n\n{table}"
    return text


def notebook_page(name: str) -> str:
    """A notebook as Markdown, with the outputs that it holds; nothing is run."""
    cells = json.loads((ROOT / f"notebooks/{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _cell(cell))


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
    for output in cell.get("outputs", ()):
        data = {kind: "".join(content) for kind, content in output.get("data", {}).items()}
        if "image/png" in data:
            yield f'<div><img alt="figure" src="data:image/png;base64,{data["image/png"].strip()}"></div>'
        elif "text/html" in data or "text/markdown" in data:
            yield data.get("text/html") or data["text/markdown"]
        else:
            yield "```text\n" + "".join(output.get("text") or data["text/plain"]).rstrip() + "\n```"
