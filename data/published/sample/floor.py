"""Errors of the numerical solver on a file of diffusion-sorption, as those of a model: how exact the file itself is."""

import sys
from pathlib import Path

import h5py
import numpy as np
import torch

from ups.solvers import solve

FAMILY = "diffusion_sorption_1d"


def nrmse(u: torch.Tensor, u_ref: torch.Tensor) -> float:
    """Mean over trajectories and times of RMS(u - u_ref) / RMS(u_ref), for u (B, T, C, X)."""
    return ((u - u_ref).square().mean((2, 3)).sqrt() / u_ref.square().mean((2, 3)).sqrt()).mean().item()


with h5py.File(Path(sys.argv[1])) as file:
    u = np.stack([group["data"][..., 0] for group in file.values()])[:, :, None]
    t = next(iter(file.values()))["grid"]["t"][:].tolist()
u = torch.from_numpy(u).float()
rollout = solve(FAMILY, u[:, 0], {}, t)
step = solve(FAMILY, u[:, :-1].flatten(0, 1), {}, t[:2])[:, 1].view_as(u[:, 1:])
print(f"one step {nrmse(step, u[:, 1:]):.3g}, rollout {nrmse(rollout[:, 1:], u[:, 1:]):.3g}")
