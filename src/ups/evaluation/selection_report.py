"""The report on choosing among candidates: tables, and error over network evaluations."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ups.evaluation.figures import png
from ups.evaluation.markdown import number, table
from ups.metrics.bootstrap import MIN_TRAJECTORIES
from ups.metrics.errors import EPS

STYLES = {  # colour, marker
    "mean": ("#1f77b4", "o"),
    "best": ("#ff7f0e", "s"),
    "weighted": ("#9467bd", "^"),
    "beam": ("#d62728", "D"),
    "oracle": ("#2ca02c", "v"),
    "operator": ("black", "x"),
}
SMALL = 8  # font size in points
MAX_COLUMNS = 4


def selection_text(found: dict[str, Any]) -> str:
    """Markdown: the decisions, what the rewards are worth, and the curves behind the figure."""
    lines = ["# Choosing among candidates by physics", "", *_decisions(found["families"]), ""]
    lines += [*_rewards(found["datasets"]), "", *_curves(found["records"]), "", "![curves](selection/selection.png)"]
    return "\n".join(lines) + "\n"


def selection_figure(records: list[dict[str, Any]]) -> bytes:
    """Validation nRMSE over network evaluations per trajectory: one panel per dataset, one line per way to choose."""
    valid = [record for record in records if record["split"] == "valid"]
    datasets = sorted({record["dataset"] for record in valid})
    num_columns = min(MAX_COLUMNS, max(1, len(datasets)))
    num_rows = max(1, -(-len(datasets) // num_columns))
    figure = Figure(figsize=(max(5.5, 2.8 * num_columns), 0.9 + 2.2 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    for i, dataset in enumerate(datasets):
        panel = figure.add_subplot(num_rows, num_columns, i + 1)
        _draw_curves(panel, [record for record in valid if record["dataset"] == dataset])
        panel.set_title(dataset[:40], fontsize=SMALL)
        panel.set_ylabel("nRMSE" if i % num_columns == 0 else "", fontsize=SMALL)
        panel.set_xlabel("network evaluations" if i >= len(datasets) - num_columns else "", fontsize=SMALL)
    if figure.axes:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=SMALL, frameon=False)
    return png(figure)


def _draw_curves(panel: Axes, records: list[dict[str, Any]]) -> None:
    for method, (colour, marker) in STYLES.items():
        points = sorted((r["evaluations"], r["nRMSE"]) for r in records if r["method"] == method)
        panel.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, linewidth=1.2, label=method)
    panel.set_xscale("log", base=2)
    panel.tick_params(which="both", labelsize=SMALL)
    panel.spines[["top", "right"]].set_visible(False)


def _decisions(families: dict[str, Any]) -> list[str]:
    lines = [
        "On where the best way of choosing on the validation split beats the mean of as many members, a single member",
        "and the operator alone: gains are differences in nRMSE, and the 95 % intervals of all three lie above 0.",
        "Intervals are over initial conditions, each with the mean over the family's datasets that start from it;",
        f"fewer than {MIN_TRAJECTORIES} have none, and leave choosing off.",
        "",
    ]
    rivals = ("mean", "single", "operator")
    columns = ("family", "split", "choosing", "way", "members", "initial conditions", *(f"over {r}" for r in rivals))
    rows = []
    for family, decision in families.items():
        way = ["on" if decision["is_on"] else "off", decision.get("method", ""), decision.get("num_members", "")]
        for split, prefix in (("valid", ""), ("test", "test_")):
            if f"{prefix}gains" in decision:
                gains = [_gain(decision[f"{prefix}gains"][rival]) for rival in rivals]
                rows.append([family, split, *way, decision[f"{prefix}num_initial_conditions"], *gains])
    return lines + table(columns, rows, num_names=4)


def _rewards(datasets: dict[str, Any]) -> list[str]:
    lines = [
        "Rank correlation of score and error among the candidates of a trajectory; of each reward its weight and, in",
        "brackets, the candidates' violation over that of the truth: no number where the truth's is below what can be",
        f"told ({EPS:g}), or a candidate diverged.",
        "",
    ]
    rows = []
    for name, worth in datasets.items():
        rewards = [f"{r} {v['weight']:.2g} ({_ratio(v['ratio_to_truth'])})" for r, v in worth["rewards"].items()]
        drawn = f"{worth['sampler']}, {worth['corrector']}"
        rows.append([name, drawn, ", ".join(rewards), _gain(worth["rank_correlation"])])
    return lines + table(("dataset", "candidates, corrector", "rewards", "rank correlation"), rows, num_names=3)


def _ratio(ratio: float | None) -> str:
    return "no number" if ratio is None else number(ratio)


def _curves(records: list[dict[str, Any]]) -> list[str]:
    columns = ("dataset", "split", "way", "members", "evaluations", "seconds", "nRMSE")
    keys = ("dataset", "split", "method", "num_members", "evaluations")
    rows = [
        [*(r[key] for key in keys), f"{r['seconds']:.2g}", f"{r['nRMSE']:.4g}{_interval(r, '.4g')}"] for r in records
    ]
    return table(columns, rows, num_names=3)


def _gain(gain: dict[str, float]) -> str:
    return f"{gain['value']:.2g}{_interval(gain, '.2g')}"


def _interval(found: dict[str, Any], digits: str) -> str:
    return f" [{found['low']:{digits}}, {found['high']:{digits}}]" if "low" in found else ""
