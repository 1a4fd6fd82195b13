"""The eleven families of PDEBench (arXiv:2210.07182), by name.

Models, caches and receipts store the names, so the order of the table and additions to it change no finished result.
"""

from ups.data.families import Families, Family

_CFD = ("eta", "zeta")
_CFD_MACH = ("mach", *_CFD)
_CFD_BOUNDARIES = {"periodic": "periodic", "outflow": "trans"}
_CFD_FORMULAS = (
    r"$\partial_t \rho + \nabla\cdot(\rho v) = 0$",
    r"$\rho\,(\partial_t v + v\cdot\nabla v) = -\nabla p + \eta\nabla^2 v + (\zeta + \eta/3)\,\nabla(\nabla\cdot v)$",
    r"$\partial_t E + \nabla\cdot[(E + p)\,v - v\cdot\sigma] = 0,\quad E = p/(\Gamma-1) + \rho v^2/2,\ \Gamma = 5/3$",
    "the generator multiplies eta and zeta by the local density",
)
_CFD_MEANINGS = {"density": "density rho", "pressure": "pressure p"}


def _velocity(axes: str) -> dict[str, str]:
    return {f"V{axis}": f"velocity along {axis}" for axis in axes}


FAMILIES = Families(
    (
        Family(
            "advection_1d", "u_t + beta u_x = 0", ("u",), ("x",), "periodic", ("beta",),
            layout="tensor", file_pattern=r"1D_Advection_.*\.(hdf5|h5)", initial_conditions="sines_1d",
            conserved=("u",), file_name="1D_Advection_Sols_beta{beta}.hdf5",
            formulas=(r"$\partial_t u + \beta\,\partial_x u = 0$",), meanings={"u": "transported quantity"},
        ),
        Family(
            "burgers_1d", "u_t + (u^2/2)_x = (nu/pi) u_xx", ("u",), ("x",), "periodic", ("nu",),
            layout="tensor", file_pattern=r"1D_Burgers_.*\.(hdf5|h5)", attributes={"nu": "Nu"},
            initial_conditions="sines_1d",
            conserved=("u",), isotropic=True, vectors=(("u",),), file_name="1D_Burgers_Sols_Nu{nu}.hdf5",
            formulas=(r"$\partial_t u + \partial_x (u^2/2) = (\nu/\pi)\,\partial_{xx} u$",), meanings={"u": "velocity"},
        ),
        Family(
            "diffusion_reaction_1d", "u_t = nu u_xx + rho u (1 - u)", ("u",), ("x",), "periodic", ("nu", "rho"),
            layout="tensor", file_pattern=r"ReacDiff_.*\.(hdf5|h5)", attributes={"nu": "Nu"},
            initial_conditions="sines_1d",
            isotropic=True, non_negative=("u",), file_name="ReacDiff_Nu{nu}_Rho{rho}.hdf5",
            formulas=(r"$\partial_t u = \nu\,\partial_{xx} u + \rho\,u\,(1 - u)$",), meanings={"u": "concentration"},
        ),
        Family(
            "diffusion_sorption_1d", "u_t = D / R(u) u_xx", ("u",), ("x",), "cauchy", (),
            layout="groups", file_pattern=r"1D_diff-sorp_.*\.(hdf5|h5)", non_negative=("u",),
            file_name="1D_diff-sorp_NA_NA.h5",
            formulas=(
                r"$\partial_t u = D/R(u)\;\partial_{xx} u,\quad R(u) = 1 + (1-\phi)\,\rho_s\,k\,n_f\,u^{n_f-1}/\phi$",
                r"$D = 0.0005,\ \phi = 0.29,\ \rho_s = 2880,\ k = 0.00035,\ n_f = 0.874$",
                r"$u = 1$ at the low end of x, $u = D\,\partial_x u$ at the high end",
            ),
            meanings={"u": "concentration"},
        ),
        Family(
            "compressible_ns_1d", "compressible Navier-Stokes, Gamma = 5/3",
            ("density", "pressure", "Vx"), ("x",), "periodic", _CFD,
            layout="fields", file_pattern=r"1D_CFD_.*\.(hdf5|h5)", positive=("density", "pressure"),
            conserved=("density",), isotropic=True, vectors=(("Vx",),),
            file_name="1D_CFD_{start}_Eta{eta}_Zeta{zeta}_{boundary}_Train.hdf5", boundary_names=_CFD_BOUNDARIES,
            # Blocks of 1,000 have consecutive seeds for density, pressure and velocity: the pressure of one block is
            # the density of the next, times ten.
            initial_condition_block=1000, pdebench_batch_size=100, formulas=_CFD_FORMULAS,
            meanings=_CFD_MEANINGS | _velocity("x"),
        ),
        Family(
            "darcy_2d", "-div(a grad u) = beta", ("u",), ("x", "y"), "dirichlet", ("beta",),
            layout="tensor", file_pattern=r"2D_DarcyFlow_.*\.(hdf5|h5)", coefficients=("nu",), steady=True,
            isotropic=True,
            positive_coefficients=("nu",), file_name="2D_DarcyFlow_beta{beta}_Train.hdf5",
            formulas=(r"$-\nabla\cdot(\nu\,\nabla u) = \beta$, with $u = 0$ on the boundary",),
            meanings={"u": "pressure head", "nu": "permeability"},
        ),
        Family(
            "compressible_ns_2d", "compressible Navier-Stokes, Gamma = 5/3",
            ("density", "pressure", "Vx", "Vy"), ("x", "y"), "periodic", _CFD_MACH,
            layout="fields", file_pattern=r"2D_CFD_.*\.(hdf5|h5)", attributes={"mach": "M"},
            positive=("density", "pressure"),
            conserved=("density",), isotropic=True, vectors=(("Vx", "Vy"),),
            file_name="2D_CFD_{start}_M{mach}_Eta{eta}_Zeta{zeta}_{boundary}_{resolution}_Train.hdf5",
            boundary_names=_CFD_BOUNDARIES, pdebench_batch_size=20, formulas=_CFD_FORMULAS,
            meanings=_CFD_MEANINGS | _velocity("xy"),
        ),
        Family(
            "diffusion_reaction_2d", "u_t = D_u lap u + u - u^3 - k - v;  v_t = D_v lap v + u - v",
            ("u", "v"), ("x", "y"), "zero_flux", (),
            layout="groups", file_pattern=r"2D_diff-react_.*\.(hdf5|h5)", isotropic=True,
            stored_yx=True, file_name="2D_diff-react_NA_NA.h5", pdebench_batch_size=5,
            formulas=(
                r"$\partial_t u = D_u \nabla^2 u + u - u^3 - k - v$", r"$\partial_t v = D_v \nabla^2 v + u - v$",
                r"$D_u = 0.001,\ D_v = 0.005,\ k = 0.005$",
            ),
            meanings={"u": "activator", "v": "inhibitor"},
        ),
        Family(
            "shallow_water_2d", "shallow water, g = 1, radial dam break", ("h",), ("x", "y"), "outflow", (),
            layout="groups", file_pattern=r"2D_rdb_.*\.(hdf5|h5)", positive=("h",), conserved=("h",), isotropic=True,
            split_axes=True, file_name="2D_rdb_NA_NA.h5", pdebench_batch_size=5, meanings={"h": "water depth"},
            formulas=(
                r"$\partial_t h + \nabla\cdot(h v) = 0$",
                r"$\partial_t (h v) + \nabla\cdot(h\,v \otimes v) + g h \nabla h = 0,\quad g = 1$",
                "the momentum h v is not stored",
            ),
        ),
        Family(
            "incompressible_ns_2d", "v_t + v.grad v = -grad p + nu lap v + c f;  c_t + v.grad c = 0",
            ("Vx", "Vy", "particles"), ("x", "y"), "wall", (),
            layout="batch", file_pattern=r"ns_incom_.*\.(hdf5|h5)",
            coefficients=("force_x", "force_y"), isotropic=True, vectors=(("Vx", "Vy"), ("force_x", "force_y")),
            divergence_free=("Vx", "Vy"), file_name="ns_incom_inhom_2d_{resolution}-{number}.h5",
            formulas=(
                r"$\partial_t v + v\cdot\nabla v = -\nabla p + \nu\nabla^2 v + c\,f,"
                r"\quad \nabla\cdot v = 0,\ \nu = 0.01$",
                r"$\partial_t c + v\cdot\nabla c = 0$",
            ),
            meanings=_velocity("xy")
            | {"particles": "particle density c", "force_x": "force f along x", "force_y": "force f along y"},
        ),
        Family(
            "compressible_ns_3d", "compressible Navier-Stokes, Gamma = 5/3",
            ("density", "pressure", "Vx", "Vy", "Vz"), ("x", "y", "z"), "periodic", _CFD_MACH,
            layout="fields", file_pattern=r"3D_CFD_.*\.(hdf5|h5)", attributes={"mach": "M"},
            positive=("density", "pressure"), conserved=("density",), isotropic=True, vectors=(("Vx", "Vy", "Vz"),),
            file_name="3D_CFD_{start}_M{mach}_Eta{eta}_Zeta{zeta}_{boundary}_Train.hdf5",
            boundary_names=_CFD_BOUNDARIES, pdebench_batch_size=5, formulas=_CFD_FORMULAS,
            meanings=_CFD_MEANINGS | _velocity("xyz"),
        ),
    )
)  # fmt: skip
