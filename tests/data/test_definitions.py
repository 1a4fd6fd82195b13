"""Definitions of families: what is wrong with one, where its parameters are in the condition, who may define it."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import h5py
import pytest

import ups
from tests.data.own import DT, KDV, X, solve_kdv
from ups.config import families_of
from ups.data.definitions import MAX_OTHER_PARAMETERS, PARAMETERS
from ups.data.families import NUM_CONDITIONS, Dataset, Families, Family, boundary_feature, condition_features
from ups.data.recognition import find_family
from ups.data.sources import find_families, list_files
from ups.errors import ConfigFault, DataFault

PLAIN = {name: list(value) if isinstance(value, tuple) else value for name, value in KDV.definition.items()}
del PLAIN["name"]
SEVEN = [f"c_{number}" for number in range(MAX_OTHER_PARAMETERS + 1)]


def test_yaml_python_and_json_define_the_same():
    """A section of `families.yml`, a call with lists, and the JSON of a data root are one definition."""
    (family,) = families_of({"_shared": {}, "kdv_1d": PLAIN})
    assert family == KDV == Family(**json.loads(json.dumps(asdict(KDV))))
    assert Family.from_json(json.dumps(KDV.definition), "here").digest == KDV.digest


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt key": ({"boundry": "wall"}, "unknown key boundry, did you mean boundary?"),
    "unknown key": ({"zzz": 1}, "unknown key zzz; known: name, equation, fields"),
    "no fields": ({"fields": []}, "fields is empty"),
    "pattern of a shell": ({"file_pattern": "*.npz"}, r"file_pattern '\*\.npz' is no regular expression"),
    "fields as text": ({"fields": "u"}, "fields = 'u': input should be a valid"),
    "field named twice": ({"fields": ["u", "u"]}, "'u' is there twice"),
    "coordinate as field": ({"fields": ["x"]}, "'x' has another meaning"),
    "number as name": ({"fields": [1]}, r"fields\.0 = 1: input should be a valid string"),
    "space in a name": ({"parameters": ["delta squared"]}, "'delta squared' is no name"),
    "word of Python": ({"parameters": ["lambda"]}, "'lambda' is no name: .* no word of Python"),
    "argument of predict": ({"parameters": ["steps"]}, "'steps' has another meaning in files and in Model.predict"),
    "argument of adapt": ({"fields": ["c"], "parameters": ["u"]}, "'u' is an argument of Model or of its exports"),
    "dimension of results": ({"fields": ["member"]}, "'member' has another meaning in files"),
    "parameter is a field": ({"parameters": ["u"]}, "'u' is there twice"),
    "parameter is a coefficient": ({"coefficients": ["delta"]}, "'delta' is there twice"),
    "too many parameters": ({"parameters": SEVEN}, "7 parameters besides beta, .*; at most 6 fit"),
    "unknown boundary": ({"boundary": "open"}, "boundary is 'open', expected one of periodic, outflow"),
    "two boundaries": ({"boundary": ["periodic", "wall"]}, "boundary has 2 conditions for 1 axes"),
    "unknown axis": ({"axes": ["r"]}, r"axes is \('r',\), expected one of"),
    "steady without input": ({"steady": True}, "a steady family needs coefficients"),
    "conserves an unknown field": ({"conserved": ["rho"]}, "conserved has 'rho', expected some of u"),
    "unit of an unknown field": ({"units": {"v": "m"}}, "units has 'v', expected some of u, delta, x, t"),
    "vector of an unknown field": ({"vectors": [["v"]]}, "vectors has 'v', which is no field"),
    "vector of another length": ({"vectors": [["u", "u"]]}, "expected one name for each of the axes x"),
    "name of an unknown boundary": ({"boundary_names": {"outfow": "trans"}}, "boundary_names has 'outfow', expected"),
    "attribute of the format": ({"attributes": {"delta": "dt"}}, "'dt' has another meaning in files"),
    "swapped axes of one array": ({"stored_yx": True}, "stored_yx is for layout 'groups' with the axes x and y"),
    "several mistakes": (
        {"boundary": "open", "conserved": ["rho", "v"], "units": {"v": "m"}},
        "boundary is 'open'.*; conserved has 'rho', 'v', expected some of u; units has 'v', expected",
    ),
    "text as truth": ({"isotropic": "yes"}, "isotropic = 'yes': input should be a valid boolean"),
    "two lines": ({"equation": "u_t\n= 0"}, "is no text of one line"),
    "layout": ({"layout": "table"}, "layout = 'table': input should be 'tensor'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_definition_is_one_line(what: str):
    """A mistake in `families.yml` names the family, the key and the remedy."""
    change, message = WRONG[what]
    with pytest.raises(ConfigFault, match=message) as caught:
        families_of({"kdv_1d": PLAIN | change})
    assert str(caught.value).startswith("families.yml, kdv_1d: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["equation", "fields", "axes", "boundary", "parameters"])
def test_what_is_required_is_named(missing: str):
    """Five keys have no default."""
    with pytest.raises(ConfigFault, match=f"^families.yml, kdv_1d: {missing} is missing$"):
        families_of({"kdv_1d": {key: value for key, value in PLAIN.items() if key != missing}})


@pytest.mark.parametrize(("name", "entry"), [("kdv-1d", PLAIN), ("1d_kdv", PLAIN), ("kdv_1d", "u_t"), ("kdv_1d", None)])
def test_a_section_needs_a_name_and_keys(name: str, entry: Any):
    """A name that is none, or a section that is text, is refused; a hyphen would name a variant."""
    with pytest.raises(ConfigFault, match=f"families.yml, {name}: "):
        families_of({name: entry})


def features(parameters: dict[str, float], boundary: tuple[str, ...] = ("periodic",)) -> list[float]:
    """The condition of a dataset with these parameters."""
    axes = len(boundary)
    dataset = Dataset("d", "f", (), (), (0.0, 1.0), (64,) * axes, (1.0,) * axes, boundary, parameters)
    return condition_features(dataset)


def test_other_parameters_take_the_slots_after_the_known_ones():
    """`nu` keeps its place; the first, second, ... other parameter is in the first, second, ... free one."""
    plain = features({})
    first = 2 + 2 * len(PARAMETERS)
    found = features({"delta": 0.01, "nu": 0.1, "mu": -100.0})
    expected = {2 + 2 * PARAMETERS.index("nu"): (-0.5, 1.0), first: (-1.0, 1.0), first + 2: (1.0, -1.0)}
    for place, (size, sign) in expected.items():
        assert found[place : place + 2] == pytest.approx([size, sign])
        found[place : place + 2] = plain[place : place + 2]
    assert found == plain and len(found) == NUM_CONDITIONS


def test_six_other_parameters_fit():
    """All slots together have the length of the condition, and none is shared."""
    names = SEVEN[:-1]
    assert replace(KDV, parameters=names).parameters == tuple(names)
    vectors = {tuple(features(dict.fromkeys(names, 1.0) | {name: 10.0})) for name in names}
    assert len(vectors) == len(names) and {len(vector) for vector in vectors} == {NUM_CONDITIONS}


def test_each_axis_has_its_boundary():
    """With one boundary condition per axis the condition has the flag of each."""
    family = replace(KDV, axes=["x", "y"], boundary=["periodic", "wall"], units={})
    assert family.boundaries == ("periodic", "wall")
    found = features({}, family.boundaries)
    assert [found[boundary_feature(axis, name)] for axis, name in enumerate(family.boundaries)] == [1.0, 1.0]
    assert found[boundary_feature(0, "wall")] == found[boundary_feature(1, "periodic")] == 0.0


def test_pdebench_keeps_its_names(families: Families):
    """PDEBench's families cannot be redefined; the same definition again is no change."""
    with pytest.raises(ConfigFault, match="family burgers_1d: PDEBench has a family of this name"):
        families.define(replace(families["burgers_1d"], conserved=()))
    families.define(families["burgers_1d"])
    assert families.defined == []


def test_a_data_root_keeps_the_definitions(families: Families, tmp_path: Path):
    """What is defined is stored and read again; what is given at the start of a run counts more."""
    families.read(tmp_path)
    families.define(KDV)
    families.write(tmp_path)
    del families["kdv_1d"]
    families.read(tmp_path)
    assert families["kdv_1d"] == KDV and families.given == []
    changed = replace(KDV, conserved=())
    families.define(changed)
    families.read(tmp_path)
    assert families["kdv_1d"] == changed and families.given == [changed]


def test_definitions_of_two_commands_are_kept(families: Families, tmp_path: Path):
    """Commands that started at the same time lose nothing of each other; of one name the last definition counts."""
    changed = replace(KDV, conserved=())
    first, second, later = (Families(families.table.values()) for _ in range(3))
    for each in (first, second):
        each.read(tmp_path)
    first.define(KDV, replace(KDV, name="wave_1d"))
    second.define(changed)
    for each in (first, second):
        each.write(tmp_path)
    later.read(tmp_path)
    assert later.defined == [changed, replace(KDV, name="wave_1d")] and first["kdv_1d"] == KDV


def test_damaged_definitions_of_a_data_root_are_one_line(families: Families, tmp_path: Path):
    """A file that was edited by hand into nonsense is named."""
    families.define(KDV)
    families.write(tmp_path)
    (path,) = tmp_path.rglob("families.json")
    path.write_text(path.read_text().replace('"periodic"', '"open"'))
    with pytest.raises(DataFault, match=f"{path} is damaged .*boundary is 'open'"):
        families.read(tmp_path)


def test_the_longest_name_that_a_file_begins_with_counts(families: Families):
    """`kdv_1d_forced_a.npz` is of `kdv_1d_forced` and not of `kdv_1d`; `kdv_1dx.npz` is of neither."""
    families.define(KDV, replace(KDV, name="kdv_1d_forced"))
    found = {name: find_family(name) for name in ("kdv_1d.npz", "kdv_1d_forced_a.npz", "kdv_1dx.npz", "a_kdv_1d.npz")}
    assert [family and family.name for family in found.values()] == ["kdv_1d", "kdv_1d_forced", None, None]


def write(folder: Path, name: str, family: Family, delta: float = 0.1) -> Path:
    """A file that carries its definition."""
    arrays = {"u": solve_kdv(3, 3, delta)}
    return ups.write_dataset(folder / name, family, arrays, parameters={"delta": delta}, coordinates={"x": X}, dt=DT)


def test_files_bring_their_definition(families: Families, tmp_path: Path):
    """A folder is enough: its family is known afterwards, and replaces what an earlier run left in the data root."""
    write(tmp_path, "a.hdf5", KDV)
    families.define(replace(KDV, conserved=()))
    families.write(tmp_path)
    del families["kdv_1d"]
    families.read(tmp_path)
    assert {entry["family"] for entry in list_files(tmp_path, tmp_path / "sums.json").values()} == {"kdv_1d"}
    assert families["kdv_1d"] == KDV


def test_definitions_must_agree(families: Families, tmp_path: Path):
    """Two files, or a file and `families.yml`, that define one family differently are refused, with the file's name."""
    write(tmp_path, "a.hdf5", KDV)
    with pytest.raises(DataFault, match=r"a\.hdf5: defines kdv_1d otherwise than PDEBench, families.yml or another"):
        find_families(tmp_path, [replace(KDV, conserved=())])
    write(tmp_path, "b.hdf5", replace(KDV, conserved=()))
    with pytest.raises(DataFault, match=r"b\.hdf5: defines kdv_1d otherwise"):
        find_families(tmp_path, [])
    assert "kdv_1d" not in families


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("kdv", "is of the family 'kdv', which is not defined; define it in conf/base/families.yml"),
        ("{", "its definition of a family: Invalid JSON"),
        ("[]", r"is of the family '\[\]', which is not defined"),
        (json.dumps(KDV.definition | {"name": "burgers_1d"}), "defines burgers_1d otherwise than PDEBench"),
        ("\x1b[2J" + "x" * 2**15, "'family' is no text of at most 16384 characters"),
    ],
)
def test_wrong_family_in_a_file_is_one_line(families: Families, tmp_path: Path, label: str, message: str):
    """A family that a file names or defines wrongly is refused with the file's name."""
    path = write(tmp_path, "a.hdf5", KDV)
    with h5py.File(path, "r+") as file:
        file.attrs["family"] = label
    with pytest.raises(DataFault, match=message) as caught:
        find_families(tmp_path, [])
    assert str(caught.value).startswith(f"{path}: ") and str(caught.value).isprintable()
