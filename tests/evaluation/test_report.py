"""The report: what a reader must find on the page, tables that can be downloaded, and animations without loss."""

import base64
import html
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.evaluation.arrays import random_arrays
from ups.data.card_text import Card, title_of
from ups.data.families import Dataset
from ups.data.pdebench import FAMILIES
from ups.errors import DataFault
from ups.evaluation.report import Results, film_of, render
from ups.evaluation.report_tables import ReportTable, Scores, corrector_rows, overview, run_rows, worst_first
from ups.files import write_json

DATASETS = {
    "1D_Burgers": Dataset(
        "1D_Burgers", "burgers_1d", ("a.h5",), (20,), (0.0, 1.0), (8,), (1.0,), ("periodic",), {"nu": 0.01}
    ),
    "2D_Darcy": Dataset("2D_Darcy", "darcy_2d", ("b.h5",), (20,), (0.0,), (4, 4), (1.0, 1.0), ("dirichlet",) * 2, {}),
}
STATISTIC = {"log": False, "mean": 0.0, "std": 1.0}


def record(dataset: str, method: str, value: float | None, **others: object) -> dict:
    """One nRMSE of rollouts, with an interval, unless `others` say something else."""
    place = {"dataset": dataset, "family": DATASETS[dataset].family, "method": method}
    numbers = {"metric": "nRMSE", "horizon": "rollout", "value": value, "low": 0.1, "high": 0.9}
    return place | numbers | {"num_trajectories": 20} | others


METRICS = [
    record("1D_Burgers", "operator", 0.25, horizon="one_step"),
    record("1D_Burgers", "operator", 0.5),
    record("1D_Burgers", "persistence", 0.7),
    record("2D_Darcy", "steady", 0.0625),
    record("2D_Darcy", "consistency", 0.06, mode="sample"),
    record("2D_Darcy", "consistency", 0.02, metric="CRPS"),
    record("2D_Darcy", "consistency", 0.95, metric="spread_skill"),
    record("1D_Burgers", "codec", 0.01),
    record("2D_Darcy", "codec", 0.01, low=None, high=None),
]
VERDICT = {
    "passed": False,
    "grades": {
        "1D_Burgers": {"family": "burgers_1d", "grade": "weak", "reasons": ["worse than FNO & U-Net"]},
        "2D_Darcy": {"family": "darcy_2d", "grade": "good", "reasons": []},
    },
    "gates": [
        {"name": "limit", "dataset": "1D_Burgers", "family": "burgers_1d", "value": None, "limit": 1.0, "passed": False}
    ],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A finished run of two datasets, without stages."""
    folder = tmp_path_factory.mktemp("arrays")
    np.savez(folder / "1D_Burgers.npz", **random_arrays((8,), 1))
    np.savez(folder / "2D_Darcy.npz", **random_arrays((4, 4), 1, num_times=1))
    statistics = {"fields": {"u": STATISTIC}, "coefficients": {}}
    sources = {name: {"bytes": 1, "md5": ""} for name in ("a.h5", "b.h5")}
    cards = {name: Card(each, {"test": [1]}, statistics, sources, ("<simulated>",)) for name, each in DATASETS.items()}
    return Results(METRICS, VERDICT, {}, folder, cards, [], None, {}, {}, folder, {"git": "abc"}, [], None, None)


def test_curves_of_the_codec_are_shown_where_they_chose_its_sizes(results: Results, page: str):
    """With curves every section has their figure, with a line per patch and the choice; without there is none."""
    errors = {"2": [1.0, 0.1, 0.0], "4": [1.0, 0.3, 0.05, 0.01, 0.0]}
    names = ("burgers_1d/fields", "darcy_2d/fields", "darcy_2d/coefficients")
    chosen = dict.fromkeys(names, {"patch": 4, "components": 2})
    rates = {"errors": dict.fromkeys(names, errors), "chosen": chosen}
    shown = render(replace(results, rates=rates), lambda _: None)
    assert shown.count("Codec: error over latents kept") == len(DATASETS) and "patch of 16 points" in shown
    assert "Codec: error over latents kept" not in page


class Reader(HTMLParser):
    """Collects addresses, ids and text of a page, and checks that elements are closed in order."""

    VOID = ("meta", "link", "input", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses, self.ids, self.open, self.text = [], set(), [], ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for name, value in attrs if name in ("href", "src", "xlink:href", "action")]
        self.ids |= {value for name, value in attrs if name == "id"}
        self.open += [] if tag in self.VOID else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def page(results: Results) -> str:
    """Return the page of these results."""
    return render(results, lambda _: None)


def test_the_page_loads_nothing_and_its_links_lead_somewhere(page: str):
    """Every address is within the page or holds its content itself; no style or script names another."""
    reader = Reader(page)
    assert reader.open == [] and len(reader.addresses) > 10
    assert [a for a in reader.addresses if not a.startswith(("#", "data:"))] == []
    assert {a[1:] for a in reader.addresses if a.startswith("#")} <= reader.ids
    assert re.findall(r"@import|fetch\(|XMLHttpRequest|url\((?!#)", page) == []


def test_an_equation_of_the_user_is_text(results: Results, monkeypatch: pytest.MonkeyPatch):
    """It is read by nobody before the report, so that formulas in it which Matplotlib does not know are no fault."""
    equation = r"$\begin{cases} u_t = u_xx & x < 1$"
    own = replace(FAMILIES["burgers_1d"], equation=equation, formulas=())
    monkeypatch.setitem(FAMILIES, "burgers_1d", own)
    assert f"<div>{html.escape(equation)}</div>" in render(results, lambda _: None)


def test_the_first_table_has_what_a_reader_looks_for(page: str):
    """Equation, grade, errors with intervals, ensemble and best of a row are on the page, the worst dataset first."""
    text = Reader(page).text
    assert "2 datasets: 1 good, 1 weak. Worst: Burgers 1D, ν = 0.01." in text
    for words in ("0.5 ★ [0.1, 0.9]", "consistency: calibrated (0.95)", "worse than FNO & U-Net", "failed"):
        assert words in text
    assert text.index("Burgers 1D, ν = 0.01") < text.index("Darcy 2D")
    assert "<simulated>" in text and "<simulated>" not in page  # text of others is escaped


def test_the_limits_name_the_datasets_without_intervals(page: str):
    """Of the two datasets the one whose scores have none."""
    assert "Too few trajectories for an interval: Darcy 2D." in Reader(page).text


def test_every_figure_is_there_for_every_dataset(page: str):
    """A transient dataset has errors over time, both have spectra, parity, trajectories, an animation and a card."""
    assert page.count("Error over time") == page.count(">Error over time<") == 1
    for caption in ("Energy spectrum", "Predicted over true values", "Worst, median and best trajectory", "Data card"):
        assert page.count(f">{caption}<") == 2
    assert page.count('class="film"') == 2


def decoded(address: str) -> np.ndarray:
    """The pixels of an image in an address."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))), dtype=np.float64)


@pytest.mark.parametrize(("grid", "family"), [((16,), "burgers_1d"), ((6, 4), "shallow_water_2d")])
def test_an_animation_holds_truth_and_prediction(grid: tuple[int, ...], family: str):
    """Truth and truth plus error, decoded as in the browser, are the arrays up to 1 % of their range."""
    arrays = random_arrays(grid, 1)
    film = film_of(family, arrays, max_bytes=10**6)
    assert json.loads(json.dumps(film, allow_nan=False))["times"] == arrays["shown"].tolist()
    trajectory = film["trajectories"][0]
    (low, high), largest = trajectory["scales"][0], trajectory["largest"][0]
    truth = low + (high - low) * decoded(trajectory["truth"]) / 255
    root = (decoded(trajectory["error"]) - 127.5) / 127.5
    expected = [arrays[f"worst/{part}"][:, 0] for part in ("truth", "prediction")]
    if len(grid) == 2:
        expected = [u.swapaxes(1, 2).reshape(-1, grid[0]) for u in expected]  # rows of y, one below the other
    assert np.abs(truth - expected[0]).max() < 0.005 * (high - low)
    assert np.abs(truth + largest * root * np.abs(root) - expected[1]).max() < 0.01 * (high - low)


def test_animations_keep_to_their_size():
    """With less room there are fewer snapshots, the first and the last among them."""
    arrays = random_arrays((8, 8), 1, num_times=12)
    film = film_of("shallow_water_2d", arrays, max_bytes=5 * 2 * 3 * 64)
    assert len(film["times"]) == 5 and (film["times"][0], film["times"][-1]) == (0.0, 1.0)


def test_datasets_are_sorted_by_grade_and_error():
    """Unusable ones come first, then by error, one that is not finite before all others of its grade."""
    scores = Scores([record("1D_Burgers", "operator", 0.5), record("2D_Darcy", "steady", None)], [])
    assert worst_first(scores, {"1D_Burgers": "weak", "2D_Darcy": "weak"}) == ["2D_Darcy", "1D_Burgers"]
    assert worst_first(scores, {"1D_Burgers": "unusable", "2D_Darcy": "good"}) == ["1D_Burgers", "2D_Darcy"]


def test_baselines_count_on_the_same_trajectories_alone():
    """FNO is shown and marked as best; a score on as many other trajectories is not shown, one that diverged is."""
    titles = {name: title_of(dataset) for name, dataset in DATASETS.items()}
    metrics = [each | {"digest": "these"} for each in METRICS[:3]]
    for digest, error, cell, best in (
        ("these", 0.4, "0.4", "FNO"),
        ("others", 0.4, "–", "rollout"),
        ("these", None, "not finite", "rollout"),
    ):
        baselines = [record("1D_Burgers", "fno", error, digest=digest)]
        table = overview(Scores(metrics, baselines), titles, {}, {}, "the test split")
        assert table.rows[0][table.columns.index("FNO")] == cell
        assert [table.columns[column] for _, column in table.best] == [best]


@pytest.mark.parametrize(
    ("spread", "words"), [(0.5, "too narrow"), (1.0, "calibrated"), (2.0, "too wide"), (None, "finite")]
)
def test_an_ensemble_is_judged_by_its_spread(spread: float | None, words: str):
    """Spread below skill is too narrow, above it too wide; without any the ensemble is off."""
    records = [
        record("2D_Darcy", "diffusion", value, metric=m) for m, value in (("CRPS", 0.1), ("spread_skill", spread))
    ]
    assert words in Scores(records, []).ensemble("2D_Darcy")
    assert "off" in Scores(METRICS[:1], []).ensemble("1D_Burgers")


def candidate(crps: float | None, miscalibration: float, exceeded: str) -> dict:
    """A tried correction with these scores and one exceeded limit."""
    scores = {"crps": crps, "mean_crps": crps, "nrmse": 1.0, "high_band": 1.0, "miscalibration": miscalibration}
    return {"method": "diffusion", "correction": {"num_steps": 8}, "exceeded": [exceeded]} | scores


@pytest.mark.parametrize("worse", [(5.0, 0.1), (None, 0.1), (0.951, 0.9)], ids=["CRPS", "not finite", "calibration"])
def test_a_corrector_that_is_off_has_the_scores_of_its_best_candidate(worse: tuple[float | None, float]):
    """The best as for the choice, in either order; a method that was not tried has none."""
    tried = [candidate(*worse, "max_crps"), candidate(0.949, 0.8, "max_miscalibration")]
    decision = {"diffusion": {"mode": "off"}, "consistency": {"mode": "off"}}
    for candidates in (tried, tried[::-1]):
        best, untried = corrector_rows({"darcy_2d": {"decision": decision, "candidates": candidates}}).rows
        assert best == ["darcy_2d", "diffusion", "off", "–", "0.949", "1", "1", "max_miscalibration"]
        assert untried == ["darcy_2d", "consistency", "off", *["–"] * 4, "no teacher"]


def test_a_corrector_that_is_on_has_its_own_scores():
    """Those of the correction that was decided on, with its network evaluations."""
    other, own = candidate(0.5, 0.1, "max_nrmse"), candidate(0.7, 0.1, "") | {"exceeded": []}
    own["correction"] = {"mode": "sample", "num_steps": 16}
    report = {"darcy_2d": {"decision": {"diffusion": own["correction"]}, "candidates": [other, own]}}
    assert corrector_rows(report).rows == [["darcy_2d", "diffusion", "sample", "16", "0.7", "1", "1", "none"]]


def test_tables_can_be_downloaded():
    """A table as CSV and as LaTeX has all cells; commas and LaTeX's own characters are escaped."""
    table = ReportTable("name", "Title", ["a", "b"], [["x, y", "50 %"]])
    assert table.csv == 'a,b\n"x, y",50 %\n'
    assert r"50 \%" in table.latex and r"\toprule" in table.latex


def test_runs_stand_side_by_side(results: Results, tmp_path: Path):
    """Another run has its error and the factor to this one; a data root without scores is named."""
    write_json(tmp_path / "08_reporting" / "metrics.json", [record("1D_Burgers", "operator", 0.25)])
    text = Reader(render(replace(results, others=[tmp_path]), lambda _: None)).text
    assert "0.25 [0.1, 0.9] (× 0.5) ★" in text
    with pytest.raises(DataFault, match="missing.*report.compare"):
        render(replace(results, others=[tmp_path / "missing"]), lambda _: None)


def test_other_files_are_not_called_a_test_split(results: Results):
    """The page of a folder names it in title, tables and limits, and says nothing of a test split."""
    text = Reader(render(replace(results, folder=Path("/of/<others>")), lambda _: None)).text
    assert "report of the files in /of/<others>" in text and "nRMSE on all trajectories in /of/<others>" in text
    assert "may be others than those of training" in text and "test split" not in text


def test_a_run_on_other_trajectories_has_no_factor():
    """Half of the error on another test split says nothing of the models, and is never the best."""
    first, same, other = (
        record("1D_Burgers", "operator", value) | {"digest": d} for value, d in ((1.0, "a"), (0.5, "a"), (0.2, "b"))
    )
    runs = {name: Scores([each], []) for name, each in (("this run", first), ("same", same), ("other", other))}
    table = run_rows(runs, {"1D_Burgers": "Burgers"})
    assert table.rows[0][2:] == ["0.5 [0.1, 0.9] (× 0.5)", "0.2 [0.1, 0.9]"] and table.best == {(0, 2)}


def test_a_run_that_diverged_has_no_factor():
    """An error that is not finite is said so, and is never the best."""
    runs = {"this run": Scores([record("1D_Burgers", "operator", 0.5)], [])}
    runs["other"] = Scores([record("1D_Burgers", "operator", None, low=None, high=None)], [])
    table = run_rows(runs, {"1D_Burgers": "Burgers"})
    assert table.rows == [["Burgers", "0.5 [0.1, 0.9]", "not finite"]] and table.best == {(0, 1)}
