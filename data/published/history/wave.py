"""Writes `raw/wave.hdf5`: u alone of the wave equation u_tt = u_xx, standing waves that are at rest at first."""

import math
from pathlib import Path

import numpy as np

import ups

NUM_TRAJECTORIES, NUM_POINTS, NUM_SNAPSHOTS, DT = 128, 64, 21, 0.05

rng = np.random.default_rng(0)
x, t = (np.arange(NUM_POINTS) + 0.5) / NUM_POINTS, DT * np.arange(NUM_SNAPSHOTS)
k = 2 * math.pi * np.arange(1, 5)
amplitude = rng.normal(size=(NUM_TRAJECTORIES, 4)) / np.arange(1, 5)
phase = rng.uniform(0, 2 * math.pi, (NUM_TRAJECTORIES, 4))
modes = np.cos(k[:, None] * x + phase[..., None])  # (N, K, X)
u = np.einsum("nk,nkx,kt->ntx", amplitude, modes, np.cos(k[:, None] * t))

wave = ups.Family("wave_1d", "u_tt = u_xx", fields=["u"], axes=["x"], boundary="periodic", parameters=[])
Path("raw").mkdir(exist_ok=True)
ups.write_dataset("raw/wave.hdf5", wave, {"u": u.astype(np.float32)}, parameters={}, coordinates={"x": x}, dt=DT)
