"""The page of the documentation with all parameters, a hook of MkDocs: see `mkdocs.yml`.

Types and bounds are those of `ups.config`, meanings the comments of `conf/base`.
"""

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
INTRODUCTION = """# Parameters

`--params operator.steps=16000` sets a parameter for one run, `parameters.yml` of an environment for all its runs.
Unknown names and impossible values end a run before any work, with one line."""
BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤", "multipleOf": "multiple of"}
PLAIN = str.maketrans({c: f"&#{ord(c)};" for c in "*_|[]<{"})
TYPES = {"string": "text", "boolean": "true or false", "null": "null", "integer": "integer", "number": "number"}


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the page."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "parameters.md", content=parameters_page()))
    return files


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
        if inner is not None:
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
    if inner is not None and isinstance(value, dict) and inner.model_fields.keys() == value.keys():
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
