"""What a data card says about a dataset: one list of sections, for the page and for the text alike."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups.data.dataset import Dataset
from ups.data.partial import read_marker
from ups.data.pdebench import FAMILIES, Family
from ups.data.registry import read_registry

MAX_FILES = 4
MEBIBYTE = 2**20

# LaTeX that Matplotlib and Markdown both read; families that are not here show `Family.equation`.
_GAS = (
    r"$\partial_t \rho + \nabla\cdot(\rho v) = 0$",
    r"$\rho\,(\partial_t v + v\cdot\nabla v) = -\nabla p + \eta\nabla^2 v + (\zeta + \eta/3)\,\nabla(\nabla\cdot v)$",
    r"$\partial_t E + \nabla\cdot[(E + p)\,v - v\cdot\sigma] = 0,\quad E = p/(\Gamma-1) + \rho v^2/2,\ \Gamma = 5/3$",
    "the generator multiplies eta and zeta by the local density",
)
EQUATIONS: dict[str, tuple[str, ...]] = {
    "advection_1d": (r"$\partial_t u + \beta\,\partial_x u = 0$",),
    "burgers_1d": (r"$\partial_t u + \partial_x (u^2/2) = (\nu/\pi)\,\partial_{xx} u$",),
    "diffusion_reaction_1d": (r"$\partial_t u = \nu\,\partial_{xx} u + \rho\,u\,(1 - u)$",),
    "diffusion_sorption_1d": (
        r"$\partial_t u = D/R(u)\;\partial_{xx} u,\quad R(u) = 1 + (1-\phi)\,\rho_s\,k\,n_f\,u^{n_f-1}/\phi$",
        r"$D = 0.0005,\ \phi = 0.29,\ \rho_s = 2880,\ k = 0.00035,\ n_f = 0.874$",
        r"$u = 1$ at the low end of x, $u = D\,\partial_x u$ at the high end",
    ),
    "compressible_ns_1d": _GAS,
    "darcy_2d": (r"$-\nabla\cdot(\nu\,\nabla u) = \beta$, with $u = 0$ on the boundary",),
    "compressible_ns_2d": _GAS,
    "diffusion_reaction_2d": (
        r"$\partial_t u = D_u \nabla^2 u + u - u^3 - k - v$",
        r"$\partial_t v = D_v \nabla^2 v + u - v$",
        r"$D_u = 0.001,\ D_v = 0.005,\ k = 0.005$",
    ),
    "shallow_water_2d": (
        r"$\partial_t h + \nabla\cdot(h v) = 0$",
        r"$\partial_t (h v) + \nabla\cdot(h\,v \otimes v) + g h \nabla h = 0,\quad g = 1$",
        "the momentum h v is not stored",
    ),
    "incompressible_ns_2d": (
        r"$\partial_t v + v\cdot\nabla v = -\nabla p + \nu\nabla^2 v + c\,f,\quad \nabla\cdot v = 0,\ \nu = 0.01$",
        r"$\partial_t c + v\cdot\nabla c = 0$",
    ),
    "compressible_ns_3d": _GAS,
}
_VELOCITY = {f"V{axis}": f"velocity along {axis}" for axis in "xyz"}
MEANINGS: dict[str, dict[str, str]] = {
    "advection_1d": {"u": "transported quantity"},
    "burgers_1d": {"u": "velocity"},
    "diffusion_reaction_1d": {"u": "concentration"},
    "diffusion_sorption_1d": {"u": "concentration"},
    "darcy_2d": {"u": "pressure head", "nu": "permeability"},
    "diffusion_reaction_2d": {"u": "activator", "v": "inhibitor"},
    "shallow_water_2d": {"h": "water depth"},
    "incompressible_ns_2d": _VELOCITY
    | {"particles": "particle density c", "force_x": "force f along x", "force_y": "force f along y"},
} | dict.fromkeys(
    ("compressible_ns_1d", "compressible_ns_2d", "compressible_ns_3d"),
    {"density": "density rho", "pressure": "pressure p"} | _VELOCITY,
)
BOUNDARY_WORDS = {
    "outflow": "outflow (zero gradient)",
    "zero_flux": "zero flux",
    "dirichlet": "Dirichlet (fixed value)",
    "cauchy": "Cauchy (fixed value, flux condition)",
    "wall": "wall (no slip)",
}
SOURCES = {
    "simulate": "simulated by ups.solvers",
    "folder": "found in the folder that the user named",
    "pdebench": "downloaded from PDEBench's data repository or a mirror of it",
}

STATISTICS = "mean, std: over the family's training split; of the log where so scaled"


@dataclass(frozen=True)
class Section:
    """A heading, formulas that may hold LaTeX, plain lines, and a table whose first row names the columns."""

    title: str
    formulas: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Card:
    """A dataset with its splits, its family's statistics, and where its files come from.

    `sources` has size and MD5 of each file, `origin` one sentence each.
    """

    dataset: Dataset
    splits: dict[str, list[int]]
    statistics: dict[str, dict[str, dict[str, Any]]]
    sources: dict[str, dict[str, Any]]
    origin: tuple[str, ...]

    @property
    def family(self) -> Family:
        return FAMILIES[self.dataset.family]

    @property
    def sections(self) -> list[Section]:
        """Everything the card says but its picture."""
        dataset, family = self.dataset, self.family
        parameters = ", ".join(f"{name} = {value:g}" for name, value in dataset.parameters.items())
        counts = ", ".join(f"{name} {len(indices)}" for name, indices in self.splits.items())
        return [
            self._equation,
            Section("Parameters", lines=(parameters or "none",)),
            Section("Domain", table=_axes(dataset, family)),
            Section("Time", lines=(_time(dataset, family),)),
            Section("Fields (dimensionless)", lines=(STATISTICS,), table=_fields(self)),
            Section("Trajectories", lines=(f"{dataset.num_trajectories}: {counts}",)),
            Section("Files", lines=tuple(_files(self))),
            Section("Source", lines=self.origin),
        ]

    @property
    def _equation(self) -> Section:
        known = EQUATIONS.get(self.family.name)
        return Section("Equation", formulas=known) if known else Section("Equation", lines=(self.family.equation,))


def find_origin(source: str, folder: Path, dataset: Dataset, sources: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """Where the files of a dataset come from, as the run, the registry and the files themselves say."""
    registry, said = read_registry(), [SOURCES[source]]
    named = [name for name in dataset.files if name in registry]
    if named and source != "simulate":
        agreeing = sum(registry[name].md5 == sources[name]["md5"] for name in named)
        said.append(f"{agreeing} of {len(dataset.files)} files have the MD5 that PDEBench publishes")
    markers = [read_marker(folder / name) for name in dataset.files]
    said += [f"partial: {marker}" for marker in markers if marker]
    return tuple(said)


def card_text(card: Card) -> str:
    """The facts of a card as Markdown."""
    parts = [f"## `{card.dataset.name}`\n\nFamily `{card.family.name}`"]
    for section in card.sections:
        parts.append(f"**{section.title}**")
        if lines := section.formulas + section.lines:
            parts.append("\n".join(f"- {line}" for line in lines))
        if section.table:
            header, *rows = (f"| {' | '.join(row)} |" for row in section.table)
            parts.append("\n".join([header, "| --- " * len(section.table[0]) + "|", *rows]))
    return "\n\n".join(parts) + "\n"


def _axes(dataset: Dataset, family: Family) -> tuple[tuple[str, ...], ...]:
    rows = zip(family.axes, dataset.lengths, dataset.grid, dataset.boundary, strict=True)
    return (
        ("axis", "length", "points", "spacing", "boundary"),
        *(
            (axis, f"{length:.4g}", f"{points}", f"{length / points:.4g}", BOUNDARY_WORDS.get(boundary, boundary))
            for axis, length, points, boundary in rows
        ),
    )


def _time(dataset: Dataset, family: Family) -> str:
    if family.steady:
        return "steady: one solution for each input"
    duration = dataset.times[-1] - dataset.times[0]
    dt = duration / max(1, len(dataset.times) - 1)
    return f"{len(dataset.times)} snapshots, dt = {dt:.4g}, duration {duration:.4g}"


def _fields(card: Card) -> tuple[tuple[str, ...], ...]:
    """Name, meaning, and the statistics that normalize a field, of its logarithm where so said."""
    meanings = MEANINGS.get(card.family.name, {})
    rows = []
    for kind, role in (("fields", ""), ("coefficients", " (given)")):
        for name, fitted in card.statistics[kind].items():
            scale = "log" if fitted["log"] else "linear"
            rows.append((name, meanings.get(name, "") + role, scale, f"{fitted['mean']:.3g}", f"{fitted['std']:.3g}"))
    return (("name", "meaning", "scale", "mean", "std"), *rows)


def _files(card: Card) -> list[str]:
    names = card.dataset.files
    lines = [f"{card.sources[name]['bytes'] / MEBIBYTE:.3g} MiB, {name}" for name in names[:MAX_FILES]]
    if len(names) > MAX_FILES:
        total = sum(card.sources[name]["bytes"] for name in names) / MEBIBYTE
        lines.append(f"and {len(names) - MAX_FILES} more, {total:.4g} MiB in all")
    return lines
