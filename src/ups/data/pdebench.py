r"""The registry of PDEBench's eleven families: what each file holds and how its fields are laid out.

Your own dataset takes one entry in `FAMILIES` and one HDF5 file. An equation with one field `u` on a line:

    Family(
        "wave_1d", "u_tt = beta^2 u_xx", "tensor", r"Wave_.*\.hdf5",
        ("u",), ("x",), "periodic", {"beta": "beta"},
    ),

    with h5py.File("Wave_beta0.5.hdf5", "w") as file:
        file["tensor"] = u                # float (N, T, X): trajectories, snapshots, points; 2D (N, T, X, Y)
        file["x-coordinate"] = x          # (X,) cell centres; `y-coordinate`, `z-coordinate` for more axes
        file["t-coordinate"] = t          # (T,) uniform times
        file.attrs["beta"] = 0.5          # one number per parameter; or in the file name: beta0.5

Several fields take the layout `fields`: one dataset (N, T, *grid) per name in place of `tensor`. A steady family
(`steady=True`) has T = 1 and its input as `coefficients`, datasets (N, *grid). Write one file per set of parameters,
with the same grid in all; give `initial_conditions` a name if trajectory `i` starts alike in all of them. Parameters
are among `PARAMETERS`, boundaries among `BOUNDARIES`: both are what the operator is told, and a name added there
changes the width of its input. Then: `kedro run --params source=folder,raw_root=DIR`.
"""

from dataclasses import dataclass
from typing import Literal

Layout = Literal["tensor", "fields", "groups", "batch"]

BOUNDARIES = ("periodic", "outflow", "zero_flux", "dirichlet", "cauchy", "wall")
PARAMETERS = ("beta", "nu", "rho", "eta", "zeta", "mach")


@dataclass(frozen=True)
class Family:
    """One PDE family of PDEBench (arXiv:2210.07182) and the layout of its HDF5 files.

    Fields are in the order of the channel axis `C`, axes in the order of `*grid`. `attributes` maps our parameter
    names to the names that PDEBench writes into HDF5 attributes and file names. `boundary` is the condition on every
    axis, unless the file name says otherwise (`trans` in compressible 1D: outflow).
    `coefficients` are fields that are given and do not change in time: Darcy's permeability, the forcing of
    incompressible Navier-Stokes. `initial_conditions` names the random stream of initial states: families and files
    with the same name start trajectory `i` from the same state. `positive` fields are encoded by their logarithm,
    `non_negative` ones may vanish too. `conserved` are fields whose integral over the domain
    does not change in time under `boundary`. The equation of an `isotropic` family is the same for mirrored axes and,
    on a domain that is the same along all axes, for swapped ones; `vectors` are fields that turn with the axes, one
    component per axis.
    """

    name: str
    equation: str
    layout: Layout
    file_pattern: str
    fields: tuple[str, ...]
    axes: tuple[str, ...]
    boundary: str
    attributes: dict[str, str]
    positive: tuple[str, ...] = ()
    non_negative: tuple[str, ...] = ()
    coefficients: tuple[str, ...] = ()
    steady: bool = False
    initial_conditions: str | None = None
    conserved: tuple[str, ...] = ()
    isotropic: bool = False
    vectors: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        expected = {
            "layout": (self.layout, ("tensor", "fields", "groups", "batch")),
            "boundary": (self.boundary, BOUNDARIES),
            "axes": (self.axes, (("x",), ("x", "y"), ("x", "y", "z"))),
        } | {f"parameter {number}": (name, PARAMETERS) for number, name in enumerate(self.attributes)}
        for what, (value, known) in expected.items():
            if value not in known:
                raise ValueError(f"family {self.name}: {what} is {value!r}, expected one of {known}")
        if self.layout == "tensor" and len(self.fields) != 1:
            raise ValueError(f"family {self.name}: layout 'tensor' has one field, not {self.fields}; use 'fields'")

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the scalars the equation depends on."""
        return tuple(self.attributes)


_CFD = {"eta": "eta", "zeta": "zeta"}
_CFD_MACH = {"mach": "M", **_CFD}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "advection_1d", "u_t + beta u_x = 0", "tensor", r"1D_Advection_.*\.(hdf5|h5)",
            ("u",), ("x",), "periodic", {"beta": "beta"}, initial_conditions="sines_1d",
            conserved=("u",),
        ),
        Family(
            "burgers_1d", "u_t + (u^2/2)_x = (nu/pi) u_xx", "tensor", r"1D_Burgers_.*\.(hdf5|h5)",
            ("u",), ("x",), "periodic", {"nu": "Nu"}, initial_conditions="sines_1d",
            conserved=("u",), isotropic=True, vectors=(("u",),),
        ),
        Family(
            "diffusion_reaction_1d", "u_t = nu u_xx + rho u (1 - u)", "tensor", r"ReacDiff_.*\.(hdf5|h5)",
            ("u",), ("x",), "periodic", {"nu": "Nu", "rho": "rho"}, initial_conditions="sines_1d",
            isotropic=True, non_negative=("u",),
        ),
        Family(
            "diffusion_sorption_1d", "u_t = D / R(u) u_xx", "groups", r"1D_diff-sorp_.*\.(hdf5|h5)",
            ("u",), ("x",), "cauchy", {}, non_negative=("u",),
        ),
        Family(
            "compressible_ns_1d", "compressible Navier-Stokes, Gamma = 5/3", "fields", r"1D_CFD_.*\.(hdf5|h5)",
            ("density", "pressure", "Vx"), ("x",), "periodic", _CFD, positive=("density", "pressure"),
            conserved=("density",), isotropic=True, vectors=(("Vx",),),
        ),
        Family(
            "darcy_2d", "-div(a grad u) = beta", "tensor", r"2D_DarcyFlow_.*\.(hdf5|h5)",
            ("u",), ("x", "y"), "dirichlet", {"beta": "beta"}, coefficients=("nu",), steady=True, isotropic=True,
        ),
        Family(
            "compressible_ns_2d", "compressible Navier-Stokes, Gamma = 5/3", "fields", r"2D_CFD_.*\.(hdf5|h5)",
            ("density", "pressure", "Vx", "Vy"), ("x", "y"), "periodic", _CFD_MACH, positive=("density", "pressure"),
            conserved=("density",), isotropic=True, vectors=(("Vx", "Vy"),),
        ),
        Family(
            "diffusion_reaction_2d", "u_t = D_u lap u + u - u^3 - k - v;  v_t = D_v lap v + u - v", "groups",
            r"2D_diff-react_.*\.(hdf5|h5)", ("u", "v"), ("x", "y"), "zero_flux", {}, isotropic=True,
        ),
        Family(
            "shallow_water_2d", "shallow water, g = 1, radial dam break", "groups", r"2D_rdb_.*\.(hdf5|h5)",
            ("h",), ("x", "y"), "outflow", {}, positive=("h",),
            conserved=("h",), isotropic=True,
        ),
        Family(
            "incompressible_ns_2d", "v_t + v.grad v = -grad p + nu lap v + c f;  c_t + v.grad c = 0", "batch",
            r"ns_incom_.*\.(hdf5|h5)", ("Vx", "Vy", "particles"), ("x", "y"), "wall", {},
            coefficients=("force_x", "force_y"), isotropic=True, vectors=(("Vx", "Vy"), ("force_x", "force_y")),
        ),
        Family(
            "compressible_ns_3d", "compressible Navier-Stokes, Gamma = 5/3", "fields", r"3D_CFD_.*\.(hdf5|h5)",
            ("density", "pressure", "Vx", "Vy", "Vz"), ("x", "y", "z"), "periodic", _CFD_MACH,
            positive=("density", "pressure"),
            conserved=("density",), isotropic=True, vectors=(("Vx", "Vy", "Vz"),),
        ),
    )
}  # fmt: skip
