"""Rollout errors of the models of a data root on 24 new trajectories of each 1D equation: mean, median and largest."""

import sys

import torch

import ups
from ups.solvers import sample_initial_states, solve

SEED, NUM_TRAJECTORIES, NUM_SNAPSHOTS = 991, 24, 41
CASES = [  # as in the small files: grid points, duration, parameters
    ("advection_1d", 256, 2.0, {"beta": 0.4}),
    ("burgers_1d", 256, 2.0, {"nu": 0.01}),
    ("compressible_ns_1d", 128, 1.0, {"eta": 0.01, "zeta": 0.01}),
    ("diffusion_reaction_1d", 128, 1.0, {"nu": 0.5, "rho": 1.0}),
]

model = ups.load(sys.argv[1])
print("| equation | mean | median | largest |\n|:--|--:|--:|--:|")
for family, num_points, duration, parameters in CASES:
    u_0, _ = sample_initial_states(family, range(NUM_TRAJECTORIES), (num_points,), SEED, parameters)
    u = solve(family, u_0, parameters, torch.linspace(0, duration, NUM_SNAPSHOTS).tolist())[:, 1:]
    u_pred = torch.from_numpy(model.predict(family, u_0.numpy(), steps=NUM_SNAPSHOTS - 1, **parameters))[:, 1:]
    errors = ((u_pred - u).square().mean(3).sqrt() / u.square().mean(3).sqrt()).mean((1, 2))
    print(f"| {family} | {errors.mean():.3g} | {errors.median():.3g} | {errors.max():.3g} |")
