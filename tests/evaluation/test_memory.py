"""The memory of an evaluation does not depend on the length of the trajectories."""

import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.evaluation.test_external import HOW
from tests.untrained import STAGE_NAMES, make_root_of, receipt

FAMILY, NAME, GRID = "incompressible_ns_2d", "ns_incom_inhom_2d_512-0.h5", (128, 128)
LENGTHS = (20, 200)
GROWTH = 1.15

SCORE = """
import json, sys
from pathlib import Path
import torch
from ups.config import WHOLE, EvaluationConfig
from ups.data.pdebench import FAMILIES
from ups.evaluation.external import external_sets
from ups.evaluation.predictions import Compute
from ups.evaluation.parts import score_sets
from ups.surrogate.trained import Trained
torch.set_num_threads(1)
folder, name, root, latent_cache, stages = sys.argv[1:]
trained = Trained(json.loads(latent_cache), json.loads(stages), Path(root))
options = {"folder": None, "folder_correctors": True, "keep_predictions": []}
config = EvaluationConfig(**options, seed=0, batch_tokens=4096, ensemble_size=4)
sets = external_sets(Path(folder), [name], WHOLE.of(FAMILIES), trained)
compute = Compute(torch.device("cpu"), memory=10**8)
records = score_sets(Path(folder) / "scores", trained.surrogate("cpu"), sets, config, compute)
assert any(record["metric"] == "CRPS" for record in records)
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with random weights for incompressible flow."""
    return make_root_of(tmp_path_factory.mktemp("root"), [FAMILY], count=5)


def write_flow(folder: Path, num_snapshots: int) -> None:
    """A file with one trajectory of random snapshots."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    with h5py.File(folder / NAME, "w") as file:
        for name, channels in (("velocity", 2), ("particles", 1)):
            stored = file.create_dataset(
                name, (1, num_snapshots, *GRID, channels), "f4", chunks=(1, 1, *GRID, channels)
            )
            for t in range(num_snapshots):
                stored[0, t] = generator.uniform(0.5, 1.5, (*GRID, channels))
        file["force"] = generator.uniform(0.5, 1.5, (1, *GRID, 2)).astype(np.float32)
        file["t"] = np.arange(num_snapshots, dtype=np.float32)[None]
        file.attrs["latestIndex"] = num_snapshots - 1


def peak_kilobytes(folder: Path, root: Path) -> int:
    """The peak of a process that scores the file, with ensembles of four members."""
    correctors = {"families": {FAMILY: dict.fromkeys(("diffusion", "consistency"), HOW)}}
    stages = {stage: receipt(root, stage) for stage in STAGE_NAMES} | {"corrector": correctors}
    given = [str(folder), NAME, str(root), json.dumps(receipt(root, "latent_cache")), json.dumps(stages)]
    found = subprocess.run([sys.executable, "-c", SCORE, *given], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return int(found.stdout.split()[-1])


@pytest.mark.slow
def test_ten_times_as_many_snapshots_need_no_more_memory(root: Path, tmp_path: Path):
    """An ensemble along 200 snapshots of 128 x 128 points takes no more than 15 % above that along 20."""
    peaks = []
    for length in LENGTHS:
        write_flow(tmp_path / str(length), length)
        peaks.append(peak_kilobytes(tmp_path / str(length), root))
    assert peaks[1] < GROWTH * peaks[0], f"{peaks} kB for {LENGTHS} snapshots"
