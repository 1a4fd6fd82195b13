"""The command that starts a job, and which job may be started again."""

import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.data.own import KDV
from tests.training.jobs import launched
from ups.data.families import Families
from ups.errors import DataFault
from ups.files import read_json, write_json
from ups.runs import torchrun
from ups.runs.run import LOG, RESULT, Run
from ups.runs.torchrun import HOST, JOB, JOIN, Job, command, environment, rank_of

FOLDER = Path("/data/06_models/operator/0123456789ab")


def test_one_node_needs_no_rendezvous():
    """On one node torchrun meets its workers over a file and loopback and never starts workers again on its own."""
    words = command("ups.training.worker", FOLDER, launched(num_processes=3), FOLDER / "store.1")
    assert words[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert words[-3:] == ["-m", "ups.training.worker", str(FOLDER)]
    expected = {"--nnodes=1", "--local-addr=127.0.0.1", f"--rdzv-endpoint={FOLDER / 'store.1'}"}
    assert expected | {"--nproc-per-node=3", "--max-restarts=0", "--log-dir=/dev/null"} <= set(words)
    assert "--rdzv-conf=store_type=file,keep_alive_interval=60" in words


@pytest.mark.parametrize("role", [HOST, JOIN])
def test_nodes_differ_in_their_role_alone(role: str):
    """The command of a node is built from module, run folder, job and role; all else is in the run folder."""
    words = Job("89ab", "ups.training.worker", "06_models/operator/0123456789ab").command(Path("/data"), role)
    assert words == [sys.executable, "-m", "ups.runs.node", "ups.training.worker", str(FOLDER), "89ab", role]


def test_announced_jobs_run_known_modules(tmp_path: Path):
    """A file that names another module, or holds more than a job, is refused in one line."""
    job = {"id": "89ab", "module": "ups.training.worker", "path": "06_models/operator/0123"}
    for wrong in ({"module": "antigravity"}, {"module": 3}, {"path": None}):
        write_json(tmp_path / JOB, job | wrong)
        with pytest.raises(DataFault, match="is damaged"):
            read_json(tmp_path / JOB, Job)
    write_json(tmp_path / JOB, job)
    assert read_json(tmp_path / JOB, Job) == Job(**job)


def test_a_store_is_new_and_private(tmp_path: Path):
    """Every job meets in an empty file of its own that only its user can read, and that goes with the job."""
    with torchrun._new_store(tmp_path) as first, torchrun._new_store(tmp_path) as second:
        assert first != second
        assert (first.stat().st_size, stat.S_IMODE(first.stat().st_mode)) == (0, 0o600)
    assert list(tmp_path.iterdir()) == []


def test_jobs_keep_compiled_code_below_the_data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All jobs of a data root share it."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    expected = str(tmp_path / ".compiled/inductor")
    assert environment(launched(), tmp_path, "lo")["TORCHINDUCTOR_CACHE_DIR"] == expected


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_matrix_products(deterministic: bool, tmp_path: Path):
    """A GPU library gets the fixed workspace that deterministic matrix products need, only where it is asked for."""
    variables = environment(launched(deterministic=deterministic), tmp_path, "lo")
    assert ("CUBLAS_WORKSPACE_CONFIG" in variables) == deterministic


def test_settings_of_nccl_reach_its_processes(tmp_path: Path):
    """A setting, which may be a number, becomes an environment variable, and one of the interface wins over ours."""
    assert environment(launched(), tmp_path, "eth1")["NCCL_SOCKET_IFNAME"] == "=eth1"  # and not eth10
    asked = {"NCCL_IB_DISABLE": 1, "NCCL_SOCKET_IFNAME": "^docker0"}
    variables = environment(launched(nccl=asked), tmp_path, "lo")
    found = {name: value for name, value in variables.items() if name.startswith("NCCL_")}
    assert found == {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "^docker0"}


@pytest.mark.parametrize("asked", [{"NCCL_PROTOCOL": "LL"}, {"LD_PRELOAD": "a.so"}, {"NCCL_DEBUG": "a b"}])
def test_settings_that_nccl_does_not_know_are_refused(asked: dict):
    """A misspelt name, which NCCL would ignore, a variable of something else, and a value with blanks are refused."""
    with pytest.raises(ValidationError, match="nccl"):
        launched(nccl=asked)


@pytest.mark.parametrize(("name", "rank"), [("alive.rank0", 0), ("fault.rank12.json", 12)])
def test_rank_in_a_file_name(name: str, rank: int):
    """The rank is read from the name of its file, even below a folder with `rank` in its name."""
    assert rank_of(Path("/rank7.d") / name) == rank


@pytest.mark.slow
def test_processes_know_the_families_of_their_command(
    families: Families, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What another command stores meanwhile under the same name, or leaves out, changes nothing for a job."""
    families.define(KDV)
    run = Run(tmp_path / "06_models/digest/01", "digest", "", {}, {}, launched(num_processes=1), "cpu", tmp_path)
    other = Families(families.table.values())
    other.define(replace(KDV, conserved=()))
    other.write(tmp_path)
    (tmp_path / "digest.py").write_text(
        "from ups.data.pdebench import FAMILIES\nfrom ups.files import write_json\n"
        "from ups.training.process import run_rank\n"
        "run_rank(lambda run, ranks: write_json(run.folder / 'result.json', FAMILIES['kdv_1d'].digest))\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(torchrun.__file__).parents[2]}")
    assert torchrun.run_query("digest", run, {}) == KDV.digest


def test_warnings_of_processes_reach_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """What the processes of a job warn of is said by the command that has started them, once, as by one process."""
    run = Run(tmp_path / "06_models/evaluate/01", "evaluate", "", {}, {}, launched(num_processes=2), "cpu", tmp_path)

    def job(module: str, run: Run, on_poll: Callable[[], None]) -> tuple[int, int]:
        lines = [f"2026-01-01 00:00:00,000 rank {rank} WARNING 3 snapshots vanish\n" for rank in (0, 1)]
        (run.folder / LOG).write_text("".join(lines))
        write_json(run.folder / RESULT, {"parts": 2})
        return 0, 0

    monkeypatch.setattr(torchrun, "run_job", job)
    assert torchrun.run_query("ups.evaluation.parts", run, {}) == {"parts": 2}
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", "3 snapshots vanish")]
