"""The figures of an evaluation: the right panels, labels and colours, drawn without warnings."""

import re
import warnings
from io import BytesIO

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.evaluation.arrays import METHODS, random_arrays
from ups.evaluation.figures import SMALLEST_ERROR, plot_errors, plot_parity, plot_spectra, plot_trajectories
from ups.evaluation.styles import COLOURS, svg


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


def cut_texts(figure: Figure) -> list[str]:
    """Return the titles, labels and legends that are not wholly on the figure."""
    figure.draw_without_rendering()
    texts = [figure._suptitle, *(text for legend in figure.legends for text in legend.get_texts())]
    texts += [panel.title for panel in figure.axes] + [panel.xaxis.label for panel in figure.axes]
    boxes = {text.get_text(): text.get_window_extent() for text in texts if text is not None and text.get_text()}
    return [words for words, box in boxes.items() if box.x0 < 0 or box.x1 > figure.bbox.x1]


def test_errors_have_a_panel_per_dataset():
    """Each dataset has its panel on one common log axis, each method one colour and one entry in the legend."""
    datasets = {f"dataset_{i}": random_arrays((8,), 1) for i in range(5)}
    datasets["dataset_4"]["curve/operator"] *= 100
    figure = plot_errors(datasets)
    assert [panel.get_title() for panel in figure.axes] == [f"Equation, ν = 1\n{name}" for name in datasets]
    assert {panel.get_yscale() for panel in figure.axes} == {"log"}
    assert len({panel.get_ylim() for panel in figure.axes}) == 1
    for panel in figure.axes:
        assert [line.get_color() for line in panel.get_lines()] == [COLOURS[method] for method in METHODS]
        assert len(panel.collections) == len(METHODS)  # the bands
    assert legend(figure) == list(METHODS)
    assert "rollouts: mean over" in figure.legends[0].get_title().get_text()
    assert cut_texts(figure) == [] and render(figure)


def test_the_legend_names_lines_alone_that_are_drawn():
    """A codec whose error is below the axis has neither a line nor an entry in the legend."""
    arrays = random_arrays((8,), 1)
    arrays["curve/codec"] = np.full(4, SMALLEST_ERROR / 10)
    figure = plot_errors({"burgers": arrays})
    assert legend(figure) == ["persistence", "operator"]
    low, high = figure.axes[0].get_ylim()
    assert all(((low < line.get_ydata()) & (line.get_ydata() < high)).all() for line in figure.axes[0].get_lines())


@pytest.mark.parametrize("errors", [np.zeros(4), np.full(4, np.nan), np.array([0.1, 1e30, np.inf, np.nan])], ids=str)
def test_errors_of_a_perfect_or_diverged_method(errors: np.ndarray):
    """Errors that a log axis cannot show leave a gap, not a warning."""
    found = {"curve/operator": errors, "band/operator": np.stack([errors, errors])}
    assert render(plot_errors({"burgers": random_arrays((8,), 1) | found}))


def test_spectra_show_truth_in_black_without_the_mean_and_without_round_off():
    """Each dataset has a log-log panel with the truth in black; wavenumbers start at 1, energies end at round-off."""
    figure = plot_spectra({"burgers": random_arrays((8,), 1), "darcy": random_arrays((8, 8), 1, num_times=1)})
    truth = next(line for line in figure.axes[0].get_lines() if line.get_label() == "truth")
    assert (figure.axes[0].get_xscale(), figure.axes[0].get_yscale()) == ("log", "log")
    assert truth.get_color() == "black"
    assert np.array_equal(truth.get_xdata(), np.arange(1, 12))
    assert figure.axes[0].get_ylim()[0] > 1e-12
    assert "predicted times" in figure.legends[0].get_title().get_text()
    assert cut_texts(figure) == [] and render(figure)


GAS = ("density", "pressure", "Vx", "Vy")


def test_every_field_of_three_trajectories_is_shown():
    """Each of four fields has rows of truth, prediction and error; two times of three trajectories are columns."""
    figure = plot_trajectories("gas", "compressible_ns_2d", random_arrays((8, 10), len(GAS)))
    images = [panel for panel in figure.axes if panel.get_images()]
    assert len(images) == 3 * len(GAS) * 6
    titles = [panel.get_title().split("\n") for panel in images[:6]]
    assert titles == [[role, f"t = {time:g}"] for role in ("worst", "median", "best") for time in (0.5, 1.0)]
    labels = [panel.get_ylabel().split("\n") for panel in images if panel.get_ylabel()]
    assert labels == [[field, kind] for field in GAS for kind in ("truth", "prediction", "error")]
    errors = [panel.get_xlabel() for panel in images[12:18]]
    assert errors == [f"nRMSE {error:.3g}" for error in (0.6, 1.2, 0.4, 0.8, 0.2, 0.4)]  # second and last step
    assert cut_texts(figure) == [] and render(figure)


def test_a_row_of_images_has_one_colour_scale():
    """Truth and prediction of all trajectories share the scale of the truth; errors are symmetric about zero."""
    arrays = random_arrays((8, 8), 1)
    figure = plot_trajectories("react", "shallow_water_2d", arrays)
    scales = [panel.get_images()[0].get_clim() for panel in figure.axes if panel.get_images()]
    shown = [arrays[f"{role}/truth"][[2, 4]] for role in ("worst", "median", "best")]
    assert set(scales[:12]) == {(float(np.min(shown)), float(np.max(shown)))}
    assert len(set(scales[12:18])) == 1 and scales[12][0] == -scales[12][1]


def test_lines_and_space_time_images_in_one_dimension():
    """A field of a line has a row of lines at the last time, then truth, prediction and error over space and time."""
    figure = plot_trajectories("burgers", "burgers_1d", random_arrays((16,), 1))
    assert len([panel for panel in figure.axes if panel.get_lines()]) == 3
    assert len([panel for panel in figure.axes if panel.get_images()]) == 9
    assert figure.axes[0].get_title() == "worst trajectory, t = 1"
    assert cut_texts(figure) == [] and render(figure)


def test_snapshot_has_x_to_the_right_and_y_upwards():
    """A cell with index (x, y) is drawn in column x and row y from below."""
    arrays = random_arrays((3, 4), 1, num_times=1)
    arrays["worst/truth"][:] = np.arange(12.0).reshape(3, 4)
    image = plot_trajectories("darcy", "darcy_2d", arrays).axes[0].get_images()[0]
    assert image.get_array()[1, 2] == 2 * 4 + 1
    assert image.origin == "lower"


FAMILY = {1: "advection_1d", 2: "darcy_2d", 3: "shallow_water_2d"}


@pytest.mark.parametrize(("grid", "num_times"), [((16,), 3), ((8, 8), 1), ((4, 4, 1), 3)], ids=str)
@pytest.mark.parametrize("wrong", [1e30, np.inf, np.nan])
def test_diverged_predictions(grid: tuple[int, ...], num_times: int, wrong: float):
    """A prediction full of huge and undefined values is drawn without a warning, at one time or several."""
    family = FAMILY[len(grid)]
    arrays = random_arrays(grid, 1, num_times, wrong)
    assert render(plot_trajectories("name", family, arrays))
    assert render(plot_parity(family, arrays))


def test_svg_follows_the_colour_of_the_page():
    """Black becomes the colour of the page's text, letters stay text, and two drawings are equal."""
    drawn = [svg(plot_errors({"burgers": random_arrays((8,), 1)})) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert drawn[0].startswith("<svg") and "#000000" not in drawn[0] and "currentColor" in drawn[0]
    assert ">nRMSE<" in drawn[0]
    assert re.findall(r'(?:href|src)="(?!#|data:)[^"]*"', drawn[0]) == []
