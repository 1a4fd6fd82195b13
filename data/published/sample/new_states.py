"""Rollout errors of the models of a data root on 24 new trajectories of nine equations: mean, median and largest."""

import sys

import torch

import ups
from ups.data.pdebench import FAMILIES
from ups.solvers import sample_initial_states, solve

SEED, NUM_TRAJECTORIES = 991, 24
CASES = [  # as in the small files: grid, snapshots, duration, parameters
    ("advection_1d", (256,), 41, 2.0, {"beta": 0.4}),
    ("burgers_1d", (256,), 41, 2.0, {"nu": 0.01}),
    ("compressible_ns_1d", (128,), 41, 1.0, {"eta": 0.01, "zeta": 0.01}),
    ("diffusion_reaction_1d", (128,), 41, 1.0, {"nu": 0.5, "rho": 1.0}),
    ("compressible_ns_2d", (32, 32), 21, 1.0, {"mach": 0.1, "eta": 0.01, "zeta": 0.01}),
    ("diffusion_reaction_2d", (64, 64), 21, 5.0, {}),
    ("shallow_water_2d", (64, 64), 21, 1.0, {}),
    ("incompressible_ns_2d", (48, 48), 21, 5.0, {}),
    ("compressible_ns_3d", (20, 20, 20), 11, 1.0, {"mach": 1.0, "eta": 1e-8, "zeta": 1e-8}),
]

model = ups.load(sys.argv[1])
print("| equation | mean | median | largest |\n|:--|--:|--:|--:|")
for family, grid, num_snapshots, duration, parameters in CASES:
    u_0, sampled = sample_initial_states(family, range(NUM_TRAJECTORIES), grid, SEED, parameters)
    u = solve(family, u_0, parameters | sampled, torch.linspace(0, duration, num_snapshots).tolist())[:, 1:]
    coefficients = {name: sampled[name].numpy() for name in FAMILIES[family].coefficients}
    given = {"steps": num_snapshots - 1, **parameters, **coefficients}
    u_pred = torch.from_numpy(model.predict(family, u_0.numpy(), **given))[:, 1:]
    errors, sizes = ((x.flatten(3).square().mean(3).sqrt()) for x in (u_pred - u, u))
    errors = (errors / sizes).mean((1, 2))
    print(f"| {family} | {errors.mean():.3g} | {errors.median():.3g} | {errors.max():.3g} |")
