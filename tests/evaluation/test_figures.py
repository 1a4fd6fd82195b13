"""The figures of an evaluation: the right panels, labels and colours, drawn without warnings."""

import warnings
from io import BytesIO

import numpy as np
import pytest
from matplotlib.figure import Figure

from ups.evaluation.figures import COLOURS, plot_errors, plot_snapshots, plot_spectra

METHODS = ("persistence", "codec", "operator")
ERRORS = {
    method: np.outer([0.1, 0.3], np.arange(1.0, 5.0)) for method in (*METHODS, "steady")
}  # two steps, four fields


def render(figure: Figure) -> bytes:
    """Draw a figure as PNG, where any warning is an error."""
    buffer = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def legend(figure: Figure) -> list[str]:
    """Return the labels of the common legend."""
    return [text.get_text() for text in figure.legends[0].get_texts()]


def snapshots(grid: tuple[int, ...], num_fields: int, num_times: int = 5) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Draw a truth and its predictions (T, C, *grid)."""
    generator = np.random.default_rng(0)
    u_ref = generator.standard_normal((num_times, num_fields, *grid), dtype=np.float32)
    return u_ref, {method: u_ref + generator.standard_normal(u_ref.shape, dtype=np.float32) for method in METHODS}


def test_errors_have_a_panel_per_dataset():
    """Each dataset has its panel and log axis, each method one colour throughout and one entry in the legend."""
    names = [f"dataset_{i}" for i in range(5)]
    curves = {name: {method: np.linspace(0.01, 0.2, 6) for method in METHODS} for name in names}
    figure = plot_errors(curves, dict.fromkeys(names, np.arange(6.0)))
    assert [panel.get_title() for panel in figure.axes] == names
    assert {panel.get_yscale() for panel in figure.axes} == {"log"}
    for panel in figure.axes:
        assert [line.get_color() for line in panel.get_lines()] == [COLOURS[method] for method in METHODS]
    assert legend(figure) == list(METHODS)
    assert render(figure)


@pytest.mark.parametrize("errors", [np.zeros(4), np.full(4, np.nan), np.array([0.1, 1e30, np.inf, np.nan])], ids=str)
def test_errors_of_a_perfect_or_diverged_method(errors: np.ndarray):
    """Errors that a log axis cannot show leave a gap, not a warning."""
    assert render(plot_errors({"burgers": {"operator": errors}}, {"burgers": np.arange(4.0)}))


def test_steady_error_is_a_point():
    """The error of a steady dataset has no time axis and is drawn as a marker."""
    figure = plot_errors({"darcy": {"steady": np.array([0.1])}}, {"darcy": np.zeros(1)})
    assert figure.axes[0].get_lines()[0].get_marker() == "o"
    assert figure.axes[0].get_xlabel() == ""
    assert render(figure)


def test_spectra_show_truth_in_black_without_the_mean():
    """Each dataset has a log-log panel with the truth in black; wavenumbers start at 1."""
    energy = np.geomspace(1.0, 1e-6, 12)
    figure = plot_spectra({"burgers": {"truth": energy, "operator": 2 * energy}, "darcy": {"truth": energy}})
    line = figure.axes[0].get_lines()[0]
    assert [panel.get_title() for panel in figure.axes] == ["burgers", "darcy"]
    assert (figure.axes[0].get_xscale(), figure.axes[0].get_yscale()) == ("log", "log")
    assert line.get_color() == "black"
    assert np.array_equal(line.get_xdata(), np.arange(1, 12))
    assert legend(figure) == ["truth", "operator"]
    assert render(figure)


def test_snapshots_1d_show_lines_and_space_time_errors():
    """Two fields give two rows of lines at three times, and two rows of truth and errors over space and time."""
    u_ref, predictions = snapshots((16,), num_fields=2)
    figure = plot_snapshots("cfd", ("density", "Vx"), np.linspace(0.1, 0.5, 5), u_ref, predictions, ERRORS)
    lines = [panel for panel in figure.axes if panel.get_lines()]
    images = [panel for panel in figure.axes if panel.get_images()]
    assert [panel.get_title() for panel in lines] == ["t = 0.1", "t = 0.3", "t = 0.5", "", "", ""]
    assert [panel.get_ylabel() for panel in lines] == ["density", "", "", "Vx", "", ""]
    assert len(images) == 2 * (1 + len(METHODS))
    assert images[3].get_title() == "operator \N{MINUS SIGN} truth\nnRMSE 0.2"  # the mean over both steps
    assert legend(figure) == ["truth", *METHODS]
    assert render(figure)


@pytest.mark.parametrize("grid", [(8, 8), (8, 10), (6, 6, 6)], ids=str)
def test_snapshots_show_at_most_three_fields(grid: tuple[int, ...]):
    """Each of the first three fields has a row of truth and predictions and a row of errors; volumes are sliced."""
    u_ref, predictions = snapshots(grid, num_fields=4)
    figure = plot_snapshots("cfd", ("density", "pressure", "Vx", "Vy"), np.arange(5.0), u_ref, predictions, ERRORS)
    images = [panel for panel in figure.axes if panel.get_images()]
    assert len(images) == 3 * (1 + 2 * len(METHODS))
    assert [panel.get_title() for panel in images[:4]] == ["truth", *METHODS]
    assert [panel.get_ylabel() for panel in images if panel.get_ylabel()] == ["density", "pressure", "Vx"]
    assert [panel.get_title() for panel in images if "nRMSE" in panel.get_title()][::3] == [
        f"nRMSE {error}"
        for error in (0.3, 0.6, 0.9)  # of the last step
    ]
    assert render(figure)


def test_snapshot_has_x_to_the_right_and_y_upwards():
    """A cell with index (x, y) is drawn in column x and row y from below."""
    u_ref = np.zeros((1, 1, 3, 4), dtype=np.float32)
    u_ref[0, 0, 2, 1] = 1.0
    figure = plot_snapshots("darcy", ("u",), np.zeros(1), u_ref, {"steady": u_ref}, ERRORS)
    image = figure.axes[0].get_images()[0]
    assert image.get_array()[1, 2] == 1.0
    assert image.origin == "lower"


@pytest.mark.parametrize("grid", [(16,), (8, 8), (4, 4, 4)], ids=str)
@pytest.mark.parametrize("wrong", [0.0, 1e30, np.inf, np.nan])
def test_snapshots_of_perfect_and_diverged_methods(grid: tuple[int, ...], wrong: float):
    """A prediction without error or full of huge and undefined values is drawn without a warning."""
    u_ref, _ = snapshots(grid, num_fields=1, num_times=3)
    predictions = {"codec": u_ref, "operator": u_ref + np.float32(wrong)}
    assert render(plot_snapshots("u", ("u",), np.arange(3.0), u_ref, predictions, ERRORS))


@pytest.mark.parametrize("grid", [(16,), (8, 8)], ids=str)
def test_steady_snapshots_have_no_time(grid: tuple[int, ...]):
    """A steady solution is one snapshot, titled by the dataset alone."""
    u_ref, predictions = snapshots(grid, num_fields=1, num_times=1)
    figure = plot_snapshots("darcy_2d", ("u",), np.zeros(1), u_ref, {"steady": predictions["codec"]}, ERRORS)
    assert figure.get_suptitle() == "darcy_2d"
    assert render(figure)
