"""Comparisons over seeds: means and spreads are right, and what cannot be laid side by side is refused."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.evaluation.test_comparison import records
from ups.config import SeedsConfig
from ups.data.families import FAMILIES_FILE, Families, Family
from ups.errors import ConfigFault, DataFault
from ups.evaluation.studies import draw_seeds
from ups.files import write_json
from ups.pipelines.studies import compare_seeds

BASELINES = {"persistence": 1.0, "linear": 0.5, "unet": 0.3, "fno": 0.2}


def report(
    root: Path, operator: float | None, dataset: str = "flow", family: str = "burgers_1d", **baselines: float
) -> str:
    """What `full` and `baselines` leave behind in a data root, both horizons alike."""
    folder = root / "08_reporting"
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps(records(dataset, {"operator": operator}, family)))
    (folder / "baseline_metrics.json").write_text(json.dumps(records(dataset, BASELINES | baselines, family)))
    return str(root)


def rows(*roots: str) -> list[list[str]]:
    """Cells of the rows of both tables, without the names of columns and the rule below them."""
    lines = [
        line for line in compare_seeds(SeedsConfig(data_roots=list(roots)))[0].splitlines() if line.startswith("|")
    ]
    return [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "---" not in line and "unet" not in line
    ]


def test_seeds_are_beside_each_other(tmp_path: Path):
    """0.1 / 0.2 where the FNO is the better one, 0.2 / 0.1 where the U-Net is; the geometric mean is 1."""
    roots = report(tmp_path / "0", 0.1), report(tmp_path / "1", 0.2, unet=0.1)
    found = rows(*roots)
    flow = ["flow", "0.2 ± 0.1", "0.2 ± 0", "0.15 ± 0.07", "0.5", "2", "1"]
    assert found == 2 * [flow, ["geometric mean", "", "", "", "0.5", "2", "1"]]


def test_further_baselines_have_tables_of_their_own(tmp_path: Path):
    """Beside them ours is compared with the best of all: 0.1 / 0.05, and 0.1 / 0.2 where the transformer is worse."""
    roots = report(tmp_path / "0", 0.1, transformer=0.05), report(tmp_path / "1", 0.11, transformer=0.9)
    text = compare_seeds(SeedsConfig(data_roots=list(roots)))[0]
    assert "## Rollout, all networks" in text and "normalized_unet" not in text
    found = [[row[0], *row[1:][-4:]] for row in rows(*roots) if row[0] == "flow"]
    assert found[2:] == 2 * [["flow", "0.475 ± 0.6", "2", "0.55", "1.05"]]


def test_families_of_other_data_roots_are_known(tmp_path: Path, families: Families):
    """Equations of one's own are defined in the data roots that are compared, not in that of the command."""
    own = Family("kdv", "u_t = -u u_x - u_xxx", ["u"], ["x"], "periodic", [])
    roots = [report(tmp_path / str(error), error, family="kdv") for error in (0.1, 0.2)]
    for root in roots:
        write_json(Path(root) / FAMILIES_FILE, [own.definition])
    assert rows(*roots)[0][0] == "flow" and "kdv" in families


def test_a_baseline_that_not_every_root_has_is_in_no_table(tmp_path: Path):
    """Ratios over other baselines in each root would not be comparable."""
    roots = report(tmp_path / "0", 0.1, transformer=0.05), report(tmp_path / "1", 0.11)
    assert "all networks" not in compare_seeds(SeedsConfig(data_roots=list(roots)))[0]


def test_a_steady_dataset_without_a_further_baseline_has_an_empty_cell(tmp_path: Path):
    """Models of normalized states are for transient families alone."""
    roots = []
    for name, error in (("0", 0.1), ("1", 0.11)):
        roots.append(report(tmp_path / name, error, normalized_fno=0.2))
        steady = records("darcy", {"steady": error}, "darcy_2d"), records("darcy", BASELINES, "darcy_2d")
        for file, more in zip(("metrics", "baseline_metrics"), steady, strict=True):
            path = tmp_path / name / "08_reporting" / f"{file}.json"
            path.write_text(json.dumps(json.loads(path.read_text()) + more))
    darcy = [row for row in rows(*roots) if row[0] == "darcy"]
    assert darcy[2:] == 2 * [["darcy", "", "0.5", "0.55", "0.524"]]


def test_a_seed_that_diverged_is_in_no_mean(tmp_path: Path):
    """Its ratio is not finite, nor is any mean over it."""
    found = rows(report(tmp_path / "0", 0.1), report(tmp_path / "1", None))
    assert [row[3:] for row in found[:2]] == [["not finite", "0.5", "not finite", "not finite"]] + [
        ["", "0.5", "not finite", "not finite"]
    ]


def test_the_figure_has_a_dot_per_seed_and_the_mean():
    """What is not finite has no dot, and the mean of that line no bar."""
    (panel,) = draw_seeds({"flow": [0.5, 2.0], "gas": [None, 0.25]}).axes
    dots = {line.get_gid(): list(line.get_xdata()) for line in panel.get_lines() if line.get_gid()}
    assert dots == {"ratios 0": [0.5, 2.0], "ratios 1": [0.25]}
    bars = [(line.get_xdata()[0], line.get_ydata()[0]) for line in panel.get_lines() if line.get_marker() == "|"]
    assert bars == [(1.0, 0)] and [label.get_text() for label in panel.get_yticklabels()] == ["flow", "gas"]


def test_the_figure_is_a_file_of_its_own(tmp_path: Path):
    """SVG on white, with the name of every dataset as text."""
    roots = [report(tmp_path / name, error) for name, error in (("a", 0.1), ("b", 0.2))]
    root = ElementTree.fromstring(compare_seeds(SeedsConfig(data_roots=roots))[1])
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and "flow" in [element.text for element in root.iter()]
    assert any("fill: #ffffff" in (element.get("style") or "") for element in root.iter())


@pytest.mark.parametrize("number", [0, 1])
def test_one_seed_is_not_enough(tmp_path: Path, number: int):
    """Nothing is said about seeds from fewer than two."""
    roots = [report(tmp_path / str(i), 0.1) for i in range(number)]
    with pytest.raises(ConfigFault, match=r"seeds\.data_roots must name at least two"):
        compare_seeds(SeedsConfig(data_roots=roots))


def test_a_root_without_comparison_is_named(tmp_path: Path):
    """The file that is missing, and what makes it."""
    roots = [report(tmp_path / name, 0.1) for name in "ab"]
    (tmp_path / "b/08_reporting/baseline_metrics.json").unlink()
    remedy = r"--pipeline full`, then `kedro run --pipeline baselines`, both with --params data_root=\S*/b,seed=N"
    with pytest.raises(DataFault, match=rf"b/08_reporting/baseline_metrics\.json does not exist: run .*{remedy}"):
        compare_seeds(SeedsConfig(data_roots=roots))


def test_baselines_of_other_trajectories_are_refused(tmp_path: Path):
    """`full` ran again with another split, and `baselines` did not."""
    roots = [report(tmp_path / "a", 0.1), report(tmp_path / "b", 0.2)]
    path = tmp_path / "b/08_reporting/metrics.json"
    path.write_text(json.dumps([record | {"digest": "other"} for record in json.loads(path.read_text())]))
    with pytest.raises(DataFault, match=r"/b: no scores of persistence, .*fno on flow: run"):
        compare_seeds(SeedsConfig(data_roots=roots))


def test_the_same_seed_twice_is_refused(tmp_path: Path):
    """Errors that agree to the last bit are of one seed, whatever the baselines had."""
    roots = [report(tmp_path / "a", 0.1), report(tmp_path / "b", 0.1, fno=0.3)]
    with pytest.raises(
        DataFault, match=r"/a and \S*/b have the same errors: run one of them anew with --params seed=N"
    ):
        compare_seeds(SeedsConfig(data_roots=roots))


def test_other_datasets_are_refused(tmp_path: Path):
    """Comparisons of different environments are no seeds of one."""
    roots = [report(tmp_path / "a", 0.1), report(tmp_path / "b", 0.1, dataset="gas")]
    with pytest.raises(DataFault, match="b has the datasets gas, not flow"):
        compare_seeds(SeedsConfig(data_roots=roots))
