"""Pages of the documentation that are made while it is built (`make docs`), by hooks of MkDocs: see `mkdocs.yml`.

The parameters come from `ups.config` and the comments of `conf/base`, notebooks with the outputs that they hold,
README, SECURITY and the published tables from the files of these names.
"""

import html
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml
from kedro.config import OmegaConfigLoader

from ups.config import Parameters
from ups.config.sections import Section
from ups.settings import CONFIG_LOADER_ARGS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ("quickstart", "own_equation", "inverse_problem")
PUBLISHED = Path("data/published")
TEXTS = {"README.md": "readme.md", "SECURITY.md": "security.md", f"{PUBLISHED}/README.md": "results.md"}
INTRODUCTION = """# Parameters

`--params operator.steps=16000` sets a parameter for one run, `parameters.yml` of an environment for all its runs.
Unknown names and impossible values end a run before any work, with one line."""
LOCAL_LINK = re.compile(r"\]\((?!https?:|#|data:)([^)\s#]+)(?:#[^)\s]*)?\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤", "multipleOf": "multiple of"}
PLAIN = str.maketrans({c: f"&#{ord(c)};" for c in "*_|[]<{"})
TYPES = {"string": "text", "boolean": "true or false", "null": "null", "integer": "integer", "number": "number"}


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

    made = {f"{name}.md": notebook_page(name) for name in NOTEBOOKS} | {"parameters.md": parameters_page()}
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
        inside = place.name if place.suffix == ".svg" else f"results.md#{place.stem}"
        known = TEXTS | {"notebooks": "quickstart.md"}
        page = known.get(str(place), inside if place.is_relative_to(PUBLISHED) else None)
        return f"]({page or place.relative_to('notebooks').with_suffix('.md')})"

    return LOCAL_LINK.sub(target, (ROOT / source).read_text(encoding="utf-8"))


def published_tables() -> str:
    """The tables in the folders of `data/published`, each with a heading of its own."""
    text = ""
    for path in sorted((ROOT / PUBLISHED).glob("*/*.md")):
        table = re.sub(r"^#+ (.*)$", r"**\1**", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        text += f"\n\n## `{path.parent.name}/{path.name}` {{ #{path.stem} }}\n\n{table}"
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


@dataclass(frozen=True)
class Row:
    """A parameter: dotted name, default, type in words, and the section and name with which its type is declared."""

    path: str
    default: Any
    kind: str
    declared: tuple[str, str]


def parameters_page() -> str:
    """Every parameter with its default, type and meaning, section by section; then what sections consist of."""
    values = OmegaConfigLoader(str(ROOT / "conf"), env="base", **CONFIG_LOADER_ARGS)["parameters"]
    comments, nested = comments_of_base(), dict[str, type[Section]]()
    rows = {name: list(rows_of(Parameters, name, name, values[name])) for name in Parameters.model_fields}
    every = [row for each in rows.values() for row in each if row.path in comments]
    # An option that several sections have is explained in one of them.
    meanings = {row.declared: comments[row.path] for row in reversed(every)} | comments
    whole = [rows[name][0] for name, section in sections().items() if section is None]
    text = [INTRODUCTION, "## The whole run", table(whole, meanings)]
    for name, section in sections().items():
        if section is not None:
            inner = list(sections_within(name, section, values[name]))
            nested |= {each.__name__: each for _, each in inner}
            text += [f"## {name}", escaped(comments.get(name, "")), inspect.getdoc(section)]
            text.append(table(rows[name], meanings))
            elsewhere = comments.keys() - {name, *(row.path for row in rows[name])}
            text.append(listed(inner, {path: comments[path] for path in elsewhere}))
            text += [f"Default of `{path}`:\n\n{lines}" for path, lines in excerpts(name).items()]
    text.append("## What sections consist of")
    for name in sorted(nested):
        text += [f"### {name}", inspect.getdoc(nested[name])]
    return "\n\n".join(part for part in text if part)


@cache
def sections() -> dict[str, type[Section] | None]:
    """The type of each section by its name; None for parameters of the whole run."""
    return {name: section_in(field.annotation) for name, field in Parameters.model_fields.items()}


def listed(inner: list[tuple[str, type[Section]]], comments: dict[str, str]) -> str:
    """A line per section within a section: dotted name, what it consists of, and its comment."""
    lines = []
    for path in dict(inner):
        consists = ", ".join(link(each.__name__) for place, each in inner if place == path)
        lines.append(f"- `{path}`: {consists}; {escaped(comments.get(path, ''))}".removesuffix("; "))
    return "\n".join(lines)


def sections_within(name: str, section: type[Section], value: dict[str, Any]) -> Iterator[tuple[str, type[Section]]]:
    """Dotted name and type: of a section whose options this one has too, of sections in it, of entries of its lists."""
    for each in section.__mro__[1:]:
        if each is not Section and each.__module__ == "ups.config.training":
            yield name, each
    for key, field in section.model_fields.items():
        inner = section_in(field.annotation)
        if inner is not None and value[key] is not None:
            yield f"{name}.{key}", inner
            yield from sections_within(f"{name}.{key}", inner, value[key]) if isinstance(value[key], dict) else ()


def section_in(annotation: Any) -> type[Section] | None:
    """The type of section that an annotation is or holds."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_in, get_args(annotation))), None)


def rows_of(section: type[Section], key: str, path: str, value: Any) -> Iterator[Row]:
    """The parameters at `key` of a section: one, or those of the section that is there."""
    inner = section_in(section.model_fields[key].annotation)
    if inner is not None and isinstance(value, dict):
        for name in inner.model_fields:
            yield from rows_of(inner, name, f"{path}.{name}", value[name])
    else:
        declared = next(each for each in reversed(section.__mro__) if key in getattr(each, "model_fields", ()))
        yield Row(path, value, words(schema_of(section)["properties"][key]), (declared.__name__, key))


def table(rows: list[Row], meanings: dict[Any, str]) -> str:
    """A line per parameter; one without a comment refers to the text about its section."""
    lines, above = ["| parameter | default | type | meaning |\n| --- | --- | --- | --- |"], ""
    for row in rows:
        meaning = escaped(meanings.get(row.path) or meanings.get(row.declared, "")) or f"see {link(row.declared[0])}"
        shorter, above = "as above" if meaning == above else meaning, meaning
        lines.append(f"| `{row.path}` | {shown(row.default)} | {row.kind} | {shorter} |")
    return "\n".join(lines)


@cache
def schema_of(section: type[Section]) -> dict[str, Any]:
    """The JSON schema of a section."""
    return section.model_json_schema()


def words(schema: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        return link(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(map(words, schema["anyOf"]))
    if options := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return ", ".join(f"`{option}`" for option in options)
    if schema["type"] == "array":
        entries = schema.get("prefixItems") or [schema["items"]]
        plural = re.sub("^(integer|number|text)", r"\1s", words(entries[0]))
        return f"{len(entries) if 'prefixItems' in schema else 'list of'} {plural}"
    if schema["type"] == "object":
        entry = schema["additionalProperties"]
        return f"{words(entry) if isinstance(entry, dict) and entry else 'any value'} by name"
    bounds = [f"{sign} {schema[bound]:g}" for bound, sign in BOUNDS.items() if bound in schema]
    bounds += [f"matching `{schema['pattern']}`"] if "pattern" in schema else []
    return " ".join([TYPES[schema["type"]], ", ".join(bounds)]).strip()


def link(section: str) -> str:
    """A link to the text about a type of section: that of the section itself, or one at the end of the page."""
    own = [name for name, kind in sections().items() if kind is not None and kind.__name__ == section]
    return f"[{section}](#{(own or [section.lower()])[0]})"


def shown(default: Any) -> str:
    """A default as YAML; of a list of sections the number of entries, which stand below the table."""
    text = json.dumps(default)
    return f"{len(default)} entries, below" if text.startswith("[{") else f"`{text}`"


def escaped(comment: str) -> str:
    """A comment for a table in Markdown, in which backticks alone have a meaning."""
    parts = comment.split("`")
    parts[::2] = [part.translate(PLAIN) for part in parts[::2]]
    return "`".join(parts)


@cache
def files_of_base() -> list[tuple[str, yaml.MappingNode]]:
    """Text and nodes of each file of parameters."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "conf/base").glob("parameters*.yml"))]
    return [(text, yaml.compose(text, Loader=yaml.SafeLoader)) for text in texts]


def comments_of_base() -> dict[str, str]:
    """The comments of `conf/base` by the dotted names of parameters and sections."""
    found: dict[str, str] = {}
    for text, root in files_of_base():
        pairs = ((name, comment_at(text.splitlines(), line)) for name, line, _ in places(root, ""))
        found |= {name: comment for name, comment in pairs if comment}
    return found


def places(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, int, yaml.Node]]:
    """Dotted name, line and value of each key; keys of an alias stand where its anchor is."""
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if key.value == "<<":
            yield from places(value, prefix)
        else:
            yield name, key.start_mark.line, value
            yield from places(value, f"{name}.") if isinstance(value, yaml.MappingNode) else ()


def comment_at(lines: list[str], line: int) -> str:
    """The comment of a line: that of the lines above it in the column of its text, that at its end, continued below."""
    above, column = line, len(lines[line]) - len(lines[line].lstrip())
    while above and lines[above - 1].startswith(f"{' ' * column}#"):
        above -= 1
    end, below = re.search(r"\s#\s", lines[line]), line + 1
    while end and below < len(lines) and lines[below].startswith(f"{' ' * (end.start() + 1)}#"):
        below += 1
    parts = lines[above:line] + ([lines[line][end.start() :]] if end else []) + lines[line + 1 : below]
    return " ".join(part.strip().removeprefix("#").strip() for part in parts)


def excerpts(section: str) -> dict[str, str]:
    """The lines of each list of sections in a section, by the dotted name of the list."""
    found: dict[str, str] = {}
    for text, root in files_of_base():
        for name, _, node in places(root, ""):
            is_list = name.startswith(f"{section}.") and isinstance(node, yaml.SequenceNode) and node.value != []
            if is_list and isinstance(node.value[0], yaml.MappingNode):
                lines = text[: node.end_mark.index].splitlines()[node.start_mark.line :]
                content = "\n".join(line[node.start_mark.column :] for line in lines).rstrip()
                found[name] = f"```yaml\n{content}\n```"
    return found
