"""A family of one's own goes from arrays to scores, data cards and figures as PDEBench's do."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import ups
from tests.data.own import DT, KDV, X, solve_kdv

PROJECT = Path(__file__).parents[1]
SECONDS_PER_RUN = 300
DELTAS = (0.05, 0.1)
WAVE = {
    "equation": "u_tt = c^2 lap u in a channel",
    "fields": ["u", "u_t"],
    "axes": ["x", "y"],
    "boundary": ["periodic", "zero_flux"],
    "parameters": ["c"],
    "conserved": ["u_t"],
    "units": {"u": "m", "u_t": "m/s", "x": "m", "y": "m", "t": "s", "c": "m/s"},
    "meanings": {"u": "elevation", "c": "speed of sound"},
}


def kedro_run(conf: Path, data_root: Path, pipeline: str, **params: str) -> subprocess.CompletedProcess[str]:
    """`kedro run --env smoke` with this configuration."""
    given = ",".join(f"{name}={value}" for name, value in ({"data_root": str(data_root)} | params).items())
    command = [sys.executable, "-m", "kedro", "run", "--env", "smoke", "--pipeline", pipeline, "--params", given]
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    environment |= {"DO_NOT_TRACK": "true", "COLUMNS": "500"}
    options: dict[str, Any] = {"cwd": PROJECT, "env": environment, "capture_output": True, "text": True}
    return subprocess.run([*command, "--conf-source", str(conf)], timeout=SECONDS_PER_RUN, check=False, **options)


def write_kdv(folder: Path) -> None:
    """Files that carry their definition, one per parameter."""
    for seed, delta in enumerate(DELTAS):
        arrays = {"u": solve_kdv(12, 6, delta, seed)}
        where = {"coordinates": {"x": X}, "dt": DT}
        ups.write_dataset(folder / f"kdv_{seed}.hdf5", KDV, arrays, parameters={"delta": delta}, **where)


def write_wave(folder: Path, count: int = 6, c: float = 1.5) -> None:
    """Standing waves between walls in y, travelling in x, in an npz whose name says family and parameter."""
    generator = np.random.default_rng(0)
    n, t = (np.arange(16) + 0.5) / 16, 0.05 * np.arange(5)[:, None, None]
    phase, amplitude = generator.uniform(0, 2 * np.pi, (count, 1, 1, 1)), generator.normal(size=(count, 1, 1, 1))
    k, m = 2 * np.pi, np.pi
    omega = c * np.hypot(k, m)
    angle, profile = k * n[:, None] - omega * t + phase, amplitude * np.cos(m * n)
    u, u_t = profile * np.cos(angle), profile * omega * np.sin(angle)
    np.savez(folder / f"channel_2d_c{c}.npz", u=u, u_t=u_t, dx=1 / 16, dy=1 / 16, dt=0.05)


@pytest.mark.slow
def test_own_families_are_scored_as_others_are(tmp_path: Path):
    """KdV from files alone and waves from `families.yml`: records, gates, cards with units, figures, and definitions.

    A later run of one pipeline finds the definitions in the data root, although no configuration has them.
    """
    raw, conf, root = tmp_path / "raw", tmp_path / "conf", tmp_path / "data"
    raw.mkdir()
    shutil.copytree(PROJECT / "conf", conf)
    write_kdv(raw)
    write_wave(raw)
    (conf / "smoke" / "families.yml").write_text(yaml.safe_dump({"channel_2d": WAVE}))
    done = kedro_run(conf, root, "full", source="folder", raw_root=str(raw))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = json.loads((root / "08_reporting/metrics.json").read_text())
    methods = {"persistence", "codec", "operator", "diffusion", "consistency"}
    for family, name in (("kdv_1d", "kdv_0"), ("kdv_1d", "kdv_1"), ("channel_2d", "channel_2d_c1.5")):
        scored = [r for r in records if (r["family"], r["dataset"], r["metric"]) == (family, name, "nRMSE")]
        assert {record["method"] for record in scored} == methods
        assert all(np.isfinite(record["value"]) for record in scored)
    assert json.loads((root / "08_reporting/verdict.json").read_text())["passed"]
    cards = (root / "08_reporting/data_cards.md").read_text()
    assert "c = 1.5 m/s (speed of sound)" in cards and "| y | 1 m | 16 | 0.0625 m | zero flux |" in cards
    assert "| u | surface elevation | m | linear |" in cards and "dt = 0.02 s" in cards
    assert (root / "08_reporting/figures/snapshots_channel_2d_c1.5.png").is_file()
    (conf / "smoke" / "families.yml").unlink()
    again = kedro_run(conf, root, "evaluation", source="folder", raw_root=str(raw), **{"evaluation.folder": str(raw)})
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    external = json.loads((root / "08_reporting/external/metrics.json").read_text())
    assert {record["family"] for record in external} == {"kdv_1d", "channel_2d"}


def test_a_wrong_definition_ends_before_any_work(tmp_path: Path):
    """A mistake in `families.yml` is one line with exit code 2."""
    conf = tmp_path / "conf"
    shutil.copytree(PROJECT / "conf", conf)
    (conf / "smoke" / "families.yml").write_text(yaml.safe_dump({"burgers_1d": WAVE}))
    done = kedro_run(conf, tmp_path / "data", "data", source="folder", raw_root=str(tmp_path))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    what = "FAULT 2 config: family burgers_1d: PDEBench has a family of this name with another definition"
    assert what in done.stderr
