"""Data cards: every fact in the text and on the page, nothing clipped or overlapping, pages whole or absent."""

import warnings
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from ups.data import cards
from ups.data.card_text import BOUNDARY_WORDS, Card, card_markdown, find_origin, title_of
from ups.data.cards import draw_card, read_sample, write_cards
from ups.data.families import BOUNDARIES, Dataset, Family, Subsample
from ups.data.pdebench import FAMILIES
from ups.data.published import read_published_files
from ups.data.simulate import file_name, simulate
from ups.data.trajectories import TrajectoryReader, find_datasets, thin
from ups.files import markdown_row

SPLITS = {"train": [2, 3], "valid": [0], "test": [1]}


def card_of(path: Path, **changes) -> Card:
    """The card of the one dataset in a file, with statistics that no other number looks like."""
    (dataset,) = find_datasets(path.parent, [path.name]).values()
    family = FAMILIES[dataset.family]
    names = {"fields": family.fields, "coefficients": family.coefficients}
    statistics = {
        kind: {name: {"log": name in family.positive, "mean": 1.23456, "std": 0.0789123} for name in of_kind}
        for kind, of_kind in names.items()
    }
    sources = {path.name: {"bytes": 5 * 2**20, "md5": "0" * 32}}
    card = {"dataset": dataset, "splits": SPLITS, "statistics": statistics, "sources": sources, "origin": ("made up",)}
    return Card(**card | changes)


def test_text_says_which_part_is_used(write):
    """A card names the points, snapshots and trajectories that are used of the files."""
    path = write("advection_1d")
    before = card_of(path)
    subsample = Subsample(every_point=2, every_snapshot=2, first_snapshot=1, last_snapshot=3, first_trajectories=4)
    after = card_markdown(replace(before, dataset=thin(path.parent, before.dataset, subsample)))
    assert "- all points, snapshots and trajectories" in card_markdown(before)
    assert "- points 0, 2, 4, ... of each axis\n- snapshots 1 to 3 in steps of 2\n- at most the first 4 traj" in after


def page_of(path: Path, card: Card) -> Figure:
    """The page of a card, drawn where any warning is an error."""
    figure = draw_card(card, *read_sample(path.parent, card.dataset, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.canvas.draw()
    return figure


def words_of(figure: Figure) -> str:
    """All text of the left column, line breaks undone."""
    return "".join(text.get_text() for text in figure.texts).replace(" ", "")


@pytest.mark.parametrize("family", FAMILIES)
def test_text_has_every_fact(write, family: str):
    """The text has equation, parameters, axes, time, fields with statistics, split counts, files and source."""
    path = write(family)
    card = card_of(path)
    text = card_markdown(card)
    facts_of_card = [
        *card.family.formulas,
        "4: train 2, valid 1, test 1",
        f"5 MiB, {path.name}",
        "made up",
        "dimensionless",
    ]
    facts_of_card += [f"{name} = {value:g}" for name, value in card.dataset.parameters.items()]
    facts_of_card += ["5 snapshots, dt = 0.25, duration 1"] * (not card.family.steady)
    for name in (*card.family.fields, *card.family.coefficients):
        facts_of_card.append(f"| {name} | {card.family.meanings[name]}")
    facts_of_card += ["| 1.23 | 0.0789 |", "| log |" if card.family.positive else "| linear |"]
    axes = zip(card.family.axes, card.dataset.grid, strict=True)
    facts_of_card += [f"| {axis} | 1 | {points} | {1 / points:.4g} |" for axis, points in axes]
    assert [fact for fact in facts_of_card if fact not in text] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_page_has_every_fact_of_the_text(write, family: str):
    """Every line and every cell of a section is on the page; no text leaves its column or covers another."""
    path = write(family)
    card = card_of(path)
    figure = page_of(path, card)
    words = words_of(figure)
    for section in card.sections:
        said = (section.title, *section.formulas, *section.lines, *(cell for row in section.table for cell in row))
        assert [line for line in said if line.replace(" ", "") not in words] == []
    boxes = [text.get_window_extent() for text in figure.texts if text.get_text()]
    assert all(box.x0 > 0 and box.y0 > 0 and box.y1 < figure.bbox.y1 for box in boxes)
    assert max(box.x1 for box in boxes) < cards.TEXT_WIDTH * cards.DPI
    assert [
        pair for pair in combinations(boxes, 2) if pair[0].shrunk(0.98, 0.7).overlaps(pair[1].shrunk(0.98, 0.7))
    ] == []


def image_of(path: Path, dataset: Dataset, title: str) -> np.ndarray:
    """What the image of this title shows of the trajectory on the page: (T, X) in 1D, else (Y, X)."""
    (name, _, time), family = title.partition(", t = "), FAMILIES[dataset.family]
    with TrajectoryReader(path.parent, dataset) as reader:
        if name in family.coefficients:
            return reader.read_coefficients(2)[family.coefficients.index(name)].T
        u = reader.read(2)[:, family.fields.index(name)]
    if len(dataset.grid) == 1:
        return u
    u = u[dataset.times.index(float(time or 0))]
    return (u[..., dataset.grid[2] // 2] if u.ndim == 3 else u).T


@pytest.mark.parametrize(
    ("family", "titles"),
    [
        ("advection_1d", {"u"}),
        ("compressible_ns_1d", {"density", "pressure", "Vx"}),
        ("darcy_2d", {"nu", "u"}),
        ("shallow_water_2d", {"h, t = 0", "h, t = 0.5", "h, t = 1"}),
        ("incompressible_ns_2d", {"force_x", "force_y", "Vx, t = 0", "particles, t = 1"}),
        ("compressible_ns_3d", {"density, t = 0", "Vz, t = 1"}),
    ],
)
def test_page_shows_a_trajectory(write, family: str, titles: set[str]):
    """In 1D each field has a space-time image; else its first, middle and last snapshot; a steady one its input."""
    path = write(family)
    card = card_of(path)
    panels = {panel.get_title(): panel for panel in page_of(path, card).get_axes()}
    assert titles <= panels.keys()
    for title in titles:
        np.testing.assert_array_equal(panels[title].images[0].get_array(), image_of(path, card.dataset, title))


def test_sample_has_few_snapshots(write):
    """Of a plane the first, middle and last snapshot are read, whatever the length; of a line all up to 256."""
    for family, expected in (("shallow_water_2d", [0, 0.5, 1]), ("advection_1d", [0, 0.25, 0.5, 0.75, 1])):
        path = write(family)
        (dataset,) = find_datasets(path.parent, [path.name]).values()
        times, u, _ = read_sample(path.parent, dataset, 1)
        assert times.tolist() == expected
        assert u.shape == (len(expected), 1, *dataset.grid)


@pytest.mark.parametrize("family", ["advection_1d", "shallow_water_2d", "compressible_ns_3d", "incompressible_ns_2d"])
def test_sample_has_few_points(write, monkeypatch: pytest.MonkeyPatch, family: str):
    """Of axes with more points than are drawn every second or third one is kept, of coefficients too."""
    monkeypatch.setattr(cards, "MAX_POINTS", 3)
    path = write(family)
    (dataset,) = find_datasets(path.parent, [path.name]).values()
    _, u, coefficients = read_sample(path.parent, dataset, 1)
    assert max(u.shape[2:]) <= 3 and max(coefficients.shape[1:]) <= 3
    with TrajectoryReader(path.parent, dataset) as reader:
        corner = (..., *[0] * min(2, len(dataset.grid)))
        expected = reader.read(1, 0, 1)
        expected = expected[..., dataset.grid[2] // 2] if len(dataset.grid) == 3 else expected
        assert np.array_equal(u[0][corner], expected[0][corner])


def test_many_and_long_names_lengthen_the_page(write):
    """A dataset of many files names the first ones and counts the rest; a long origin is wrapped, not clipped."""
    path = write("incompressible_ns_2d")
    dataset = card_of(path).dataset
    names = tuple(f"ns_incom_inhom_2d_8-{number}.h5" for number in range(274))
    sources = {name: {"bytes": 2**20, "md5": ""} for name in names}
    many = replace(dataset, files=names, counts=(4,) * 274)
    card = card_of(path, dataset=many, sources=sources, origin=("partial: " + "trajectories " * 400,))
    assert "and 270 more, 274 MiB in all" in card_markdown(card)
    figure = draw_card(card, np.zeros(1), np.zeros((1, 3, 8, 6)), np.zeros((2, 8, 6)))
    assert figure.get_figheight() > cards.HEIGHT
    assert min(text.get_window_extent().y0 for text in figure.texts) > 0


def test_own_family_shows_its_equation(write, monkeypatch: pytest.MonkeyPatch):
    """A family without an entry here shows what the registry says of it, dollar signs and all."""
    own = Family("own", "u_t = $5 u_xx$ and $ more", ("u",), ("x",), "periodic", (), "tensor", r"Own_.*\.hdf5")
    monkeypatch.setitem(FAMILIES, "own", own)
    path = write("own", "Own_1.hdf5")
    card = card_of(path)
    assert own.equation in card_markdown(card)
    assert markdown_row(("equation", "|psi|^2")) == r"| equation | \|psi\|^2 |"
    assert own.equation.replace(" ", "") in words_of(page_of(path, card))


def test_hostile_names_are_plain_text(write):
    """A file name with dollar signs or letters that the font lacks is neither a formula nor a warning."""
    path = write("advection_1d", "1D_Advection_$\\frac$_\u6d41_beta0.4.hdf5")
    assert r"1D_Advection_$\frac$_?_beta0.4.hdf5" in words_of(page_of(path, card_of(path)))


def test_volumes_are_cut_in_the_middle(write):
    """Of a volume the plane in the middle of z is shown, cut before the next snapshot is read."""
    path = write("compressible_ns_3d")
    (dataset,) = find_datasets(path.parent, [path.name]).values()
    _, u, _ = read_sample(path.parent, dataset, 1)
    with TrajectoryReader(path.parent, dataset) as reader:
        assert np.array_equal(u, reader.read(1)[[0, 2, 4], ..., dataset.grid[2] // 2])


def test_origin_is_checked(write):
    """A file is called published if its MD5 is, and partial if it says so."""
    marker = f"trajectories 0-3 of 10000 of 1D_Advection_Sols_beta0.4.hdf5, MD5 {'0' * 32}"
    path = write("advection_1d", edit=lambda file: file.attrs.update(ups_partial=np.bytes_(marker)))
    (dataset,) = find_datasets(path.parent, [path.name]).values()
    published = {path.name: {"bytes": 1, "md5": read_published_files()[path.name].md5}}
    said = find_origin("pdebench", path.parent, dataset, published)
    assert said[0].startswith("downloaded") and said[2] == f"partial: {marker}"
    assert said[1] == "1 of 1 files have the MD5 that PDEBench publishes"
    other = find_origin("folder", path.parent, dataset, {path.name: {"bytes": 1, "md5": "0" * 32}})
    assert "folder" in other[0] and other[1].startswith("0 of 1 files")
    simulated = find_origin("simulate", path.parent, dataset, {path.name: {"bytes": 1, "md5": "0" * 32}})
    assert not any("files have the MD5" in line for line in simulated)


def test_words_for_all_families():
    """Every family, field, coefficient and boundary of the registry has its words."""
    for family in FAMILIES.values():
        assert family.formulas
        assert set(family.meanings) >= {*family.fields, *family.coefficients}
    assert set(BOUNDARY_WORDS) | {"periodic"} == set(BOUNDARIES)


def write_simulated(folder: Path) -> dict:
    """Cards of two simulated files in `folder / "cards"`; returns the description of the datasets."""
    for family, num_snapshots in (("advection_1d", 3), ("darcy_2d", 1)):
        sizes = {"num_trajectories": 4, "resolution": 8, "num_snapshots": num_snapshots, "duration": 1.0, "seed": 0}
        simulate(folder / file_name(family, {"beta": 1.0}), family=family, parameters={"beta": 1.0}, **sizes)
    described = find_datasets(folder, [path.name for path in folder.glob("*.hdf5")])
    datasets = {
        "datasets": {name: asdict(dataset) for name, dataset in described.items()},
        "splits": dict.fromkeys(described, SPLITS),
        "sources": {name: {"bytes": 1, "md5": ""} for dataset in described.values() for name in dataset.files},
    }
    fitted = {"log": False, "mean": 0.0, "std": 1.0}
    statistics = {
        "advection_1d": {"fields": {"u": fitted}, "coefficients": {}},
        "darcy_2d": {"fields": {"u": fitted}, "coefficients": {"nu": fitted}},
    }
    write_cards(folder / "cards", folder, datasets, statistics, "simulate", lambda count: None)
    return datasets


def test_one_page_per_dataset(tmp_path: Path):
    """Each simulated dataset has its page, linked from the text by a relative path."""
    datasets = write_simulated(tmp_path)
    pages = sorted(path.stem for path in (tmp_path / "cards").glob("*.png"))
    assert pages == sorted(datasets["datasets"])
    text = (tmp_path / "cards" / "cards.md").read_text()
    assert all(f"](data_cards/{name}.png)" in text for name in pages)
    assert "simulated by ups.solvers" in text


def test_pages_are_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A page whose drawing fails leaves neither a part of it nor a text that names it."""

    def fail(figure: Figure, path: Path, **_: str) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        write_simulated(tmp_path)
    assert list((tmp_path / "cards").iterdir()) == []


@pytest.mark.parametrize(
    ("family", "parameters", "title"),
    [
        ("burgers_1d", {"nu": 0.01}, "Burgers 1D, ν = 0.01"),
        ("compressible_ns_2d-512x512", {"mach": 1.0}, "Compressible Navier–Stokes 2D, 512x512, M = 1"),
        ("wave", {"delta": 0.5}, "Wave, delta = 0.5"),
    ],
)
def test_titles_are_equation_and_parameters(family: str, parameters: dict[str, float], title: str):
    """Parameters that PDEBench does not have keep their names."""
    dataset = Dataset("a", family, ("a",), (1,), (0.0, 1.0), (8,), (1.0,), ("periodic",), parameters)
    assert title_of(dataset) == title
