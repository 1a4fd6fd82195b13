"""Names that the definition of a family may have, and what can be wrong with a definition."""

import keyword
import re
from collections.abc import Container, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from ups.errors import ConfigFault, nearest

if TYPE_CHECKING:
    from ups.data.families import Family

Layout = Literal["tensor", "fields", "groups", "batch"]

BOUNDARIES = ("periodic", "outflow", "zero_flux", "dirichlet", "cauchy", "wall")
PARAMETERS = ("beta", "nu", "rho", "eta", "zeta", "mach")
MAX_OTHER_PARAMETERS = 6  # of a family, besides those in `PARAMETERS`
AXES = ("x", "y", "z")
MAX_DIMS = len(AXES)
NUM_PARAMETERS = len(PARAMETERS) + MAX_OTHER_PARAMETERS
# Length K of `condition_features`: time step, resolution, two per parameter, existence and boundary per axis.
NUM_CONDITIONS = 2 + 2 * NUM_PARAMETERS + MAX_DIMS * (1 + len(BOUNDARIES))
# Other meanings of names in files of data, in labelled results and among the arguments of `Model.predict`.
RESERVED = {*AXES, *(f"d{axis}" for axis in AXES), "t", "dt", "time", "tensor", "family", "trajectory", "member"}
RESERVED |= {"u_0", "u_before", "steps", "members", "seed", "self", "model", "start", "device", "request", "origin"}
# What is given by name beside parameters and coefficients: to methods of `Model`, exported models and `ups predict`.
ARGUMENTS = {"u", "labels", "lengths", "path", "form", "coefficients", "output", "help"}


def base_of(name: str) -> str:
    """The family of a variant; of a family its own name."""
    return name.partition("-")[0]


def is_named(family: str, names: Container[str]) -> bool:
    """Whether `names` has this family, or the one of which it is a variant."""
    return family in names or base_of(family) in names


def as_tuple(value: Any) -> Any:
    """The value, with tuples in place of all lists."""
    return tuple(map(as_tuple, value)) if isinstance(value, list | tuple) else value


def problems_of(family: "Family") -> Iterator[str]:
    """What is wrong with a definition."""
    if not _is_name(base_of(family.name)):
        yield "the name must be letters, digits and _, and not begin with a digit"
    names = ("fields", "axes", "parameters", "coefficients", "positive", "non_negative", "conserved", "vectors")
    names += ("divergence_free", "positive_coefficients", "formulas")
    if no_lists := [option for option in names if not isinstance(getattr(family, option), tuple)]:
        yield from (f"{option} is {getattr(family, option)!r}, expected a list of names" for option in no_lists)
        return
    if family.axes not in (AXES[:1], AXES[:2], AXES):
        yield f"axes is {family.axes!r}, expected one of ('x',), ('x', 'y'), ('x', 'y', 'z')"
    if len(family.boundaries) != len(family.axes):
        yield f"boundary has {len(family.boundaries)} conditions for {len(family.axes)} axes"
    for boundary in family.boundaries:
        if boundary not in BOUNDARIES:
            yield f"boundary is {boundary!r}, expected one of {', '.join(BOUNDARIES)}"
    if family.layout not in get_args(Layout):
        yield f"layout is {family.layout!r}, expected one of {', '.join(get_args(Layout))}"
    yield from _problems_of_names(family)
    try:
        re.compile(family.file_pattern or "")
    except re.error as error:
        yield f"file_pattern {family.file_pattern!r} is no regular expression ({error}); any text is .*"
    for text in (family.equation, *family.formulas, *family.meanings.values(), *family.units.values()):
        if not isinstance(text, str) or not text.isprintable():
            yield f"{text!r} is no text of one line"
    if family.layout == "tensor" and len(family.fields) != 1:
        yield f"layout 'tensor' has one field, not {family.fields}; use 'fields'"
    if family.stored_yx and (family.layout != "groups" or family.axes != AXES[:2]):
        yield "stored_yx is for layout 'groups' with the axes x and y; store (N, T, X, Y) and leave it out"
    if family.steady and not family.coefficients:
        yield "a steady family needs coefficients, the fields that its solution depends on"


def _problems_of_names(family: "Family") -> Iterator[str]:
    if not family.fields:
        yield "fields is empty, name at least one"
    all_names = (*family.fields, *family.coefficients, *family.parameters)
    for name in all_names:
        if not _is_name(name):
            yield f"{name!r} is no name: letters, digits and _, no digit first, no word of Python such as lambda"
        if all_names.count(name) > 1:
            yield f"{name!r} is there twice; fields, coefficients and parameters need names of their own"
    for name in sorted(RESERVED & {*map(str, all_names), *map(str, family.attributes.values())}):
        yield f"{name!r} has another meaning in files and in Model.predict; choose another name"
    for name in sorted(ARGUMENTS & {*map(str, family.coefficients), *map(str, family.parameters)}):
        yield f"{name!r} is an argument of Model or of its exports; choose another name"
    others = [name for name in family.parameters if name not in PARAMETERS]
    if len(others) > MAX_OTHER_PARAMETERS:
        what = f"{len(others)} parameters besides {', '.join(PARAMETERS)}: {', '.join(map(str, others))}"
        yield f"{what}; at most {MAX_OTHER_PARAMETERS} fit, combine or leave out some"
    known = {"positive_coefficients": family.coefficients, "attributes": family.parameters}
    known |= dict.fromkeys(("positive", "non_negative", "conserved", "divergence_free"), family.fields)
    known |= {"meanings": all_names, "units": (*all_names, *family.axes, "t"), "boundary_names": BOUNDARIES}
    for option, expected in known.items():
        if unknown := [repr(name) for name in getattr(family, option) if name not in expected]:
            choice = f"some of {', '.join(map(str, expected))}" if expected else "none"
            yield f"{option} has {', '.join(unknown)}, expected {choice}"
    for vector in family.vectors:
        if not isinstance(vector, tuple) or len(vector) != len(family.axes):
            yield f"vectors has {vector!r}, expected one name for each of the axes {', '.join(map(str, family.axes))}"
            continue
        for name in vector:
            if name not in (*family.fields, *family.coefficients):
                yield f"vectors has {name!r}, which is no field"


def validated(kind: type["Family"], text: str, place: str) -> "Family":
    """The `Family` that a JSON object defines.

    Raises:
        ConfigFault: naming `place` and every wrong key or value there.
    """
    from pydantic import TypeAdapter, ValidationError  # families of the table do without

    try:
        family = TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        known = [field.name for field in fields(kind)]
        what = "; ".join(_explain(problem, known) for problem in error.errors(include_url=False))
        raise ConfigFault(f"{place}: {what}") from None
    if base_of(family.name) != family.name:
        raise ConfigFault(f"{place}: {family.name!r} would be a variant of a family; choose a name without hyphen")
    return family


def _explain(problem: dict[str, Any], known: list[str]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "unexpected_keyword_argument":
        return f"unknown key {key}{nearest(key, known)}"
    if problem["type"].startswith("missing"):
        return f"{key} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{key} = {problem['input']!r}: {message[0].lower()}{message[1:]}" if key else message


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
