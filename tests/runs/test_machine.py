"""Micro-batches that were found to fit, and times."""

import sys
import time
from importlib import machinery
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.contents import expect_one_line
from tests.training.jobs import launched
from ups.errors import ConfigFault, DataFault
from ups.runs import machine, processes, torchrun

SECTION = {"model": {"hidden_channels": [8, 8, 8]}, "precision": "float32", "batch_tokens": 64, "seed": 0}


def tuned(root: Path, stage: str = "operator", device: str = "cpu", **launch: Any) -> int | None:
    """The micro-batch of a run with the options of `SECTION`."""
    return machine.with_tuned_micro_batch(launched(**launch), stage, SECTION, device, root).micro_batch_tokens


def test_what_is_remembered_is_applied(tmp_path: Path):
    """A run takes the micro-batch that was found for its stage, device and processes."""
    machine.save_micro_batch(launched(), "operator", SECTION, "cpu", tmp_path, 512)
    assert tuned(tmp_path) == 512


@pytest.mark.parametrize("changed", [{"model": {}}, {"precision": "bfloat16"}, {"batch_tokens": 128}, {"kind": "fno"}])
def test_what_was_found_for_another_model_is_not(tmp_path: Path, changed: dict[str, Any]):
    """Its memory is another; another seed changes none."""
    machine.save_micro_batch(launched(), "operator", SECTION, "cpu", tmp_path, 512)
    others = (
        machine.with_tuned_micro_batch(launched(), "operator", SECTION | {"seed": 1}, "cpu", tmp_path),
        machine.with_tuned_micro_batch(launched(), "operator", SECTION | changed, "cpu", tmp_path),
        machine.with_tuned_micro_batch(launched(memory_gigabytes=1.0), "operator", SECTION, "cpu", tmp_path),
    )
    assert [launch.micro_batch_tokens for launch in others] == [512, None, None]


@pytest.mark.parametrize(
    ("launch", "stage", "device"),
    [({"num_processes": 3}, "operator", "cpu"), ({}, "steady", "cpu"), ({}, "operator", "cuda")]
    + [({"sharding": "fsdp"}, "operator", "cpu")],
)
def test_what_was_found_elsewhere_is_not(tmp_path: Path, launch: dict, stage: str, device: str):
    """Another stage, device, sharding or number of processes says nothing."""
    machine.save_micro_batch(launched(), "operator", SECTION, "cpu", tmp_path, 512)
    assert tuned(tmp_path, stage, device, **launch) is None


def test_a_parameter_comes_first(tmp_path: Path):
    """Who names a micro-batch gets it."""
    machine.save_micro_batch(launched(), "operator", SECTION, "cpu", tmp_path, 512)
    assert tuned(tmp_path, micro_batch_tokens=64) == 64


def test_much_data_is_scored_by_all_cores_of_a_cpu(monkeypatch: pytest.MonkeyPatch):
    """Little data by one process, and what the parameters or a GPU say comes first."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2, 5})
    one, two = (launched(device="auto", num_processes=number) for number in (1, 2))
    scoring = machine.scoring_launch(one, machine.MANY_TOKENS)
    assert (scoring.num_processes, scoring.threads_per_process) == (4, 1)
    assert machine.scoring_launch(one, machine.MANY_TOKENS - 1) == one
    assert machine.scoring_launch(two, machine.MANY_TOKENS) == two
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert machine.scoring_launch(one, machine.MANY_TOKENS) == one


def test_a_job_has_the_cores_that_it_may_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Not all of a machine of which a batch system gives it eight: four for each of two processes."""
    monkeypatch.setattr("os.cpu_count", lambda: 256)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    launch = launched(num_processes=2, threads_per_process=None)
    assert torchrun.environment(launch, tmp_path, "lo")["OMP_NUM_THREADS"] == "4"


def test_places_do_not_disturb_each_other(tmp_path: Path):
    """What is remembered for one stage leaves the others, and the last word counts."""
    for stage, tokens in (("operator", 512), ("steady", 64), ("operator", 256)):
        machine.save_micro_batch(launched(), stage, SECTION, "cpu", tmp_path, tokens)
    assert (tuned(tmp_path, "operator"), tuned(tmp_path, "steady")) == (256, 64)


@pytest.mark.parametrize("tokens", [None, 512])
def test_a_wrong_file_is_one_line(tmp_path: Path, tokens: int | None):
    """Whatever stands in `tuning.json`, who reads it or adds to it says what is wrong in one line."""
    machine.save_micro_batch(launched(), "operator", SECTION, "cpu", tmp_path, 512)
    path = tmp_path / "06_models/tuning.json"
    if tokens is None:
        expect_one_line(path, lambda: machine.with_tuned_micro_batch(launched(), "operator", SECTION, "cpu", tmp_path))
    else:
        expect_one_line(path, lambda: machine.save_micro_batch(launched(), "steady", SECTION, "cpu", tmp_path, tokens))


@pytest.mark.parametrize("tokens", ['"512"', "0", "-1", "1.5", "true", "[]"])
def test_a_wrong_micro_batch_is_one_line(tmp_path: Path, tokens: str):
    """A micro-batch is a positive number of tokens."""
    path = tmp_path / "06_models/tuning.json"
    path.parent.mkdir()
    path.write_text(f'{{"operator on 1 x cpu, ddp": {tokens}}}')
    with pytest.raises(
        DataFault, match=r"tuning\.json is damaged \(operator on 1 x cpu, ddp.*; delete it and run again$"
    ):
        machine.with_tuned_micro_batch(launched(), "operator", SECTION, "cpu", tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "instead"), [("compile", "reduce-overhead", True), ("sharding", "fsdp-offload", "fsdp")]
)
def test_what_takes_a_gpu_is_refused_without_one(name: str, value: str, instead: object):
    """CUDA graphs and offloading on a CPU are one line that names the remedy, which is not refused."""
    wanted = rf"^launch\.{name}={value} needs a GPU: set launch\.{name}={str(instead).lower()}$"
    with pytest.raises(ConfigFault, match=wanted):
        machine.training_device(launched(**{name: value}), "operator", "float32")
    assert machine.training_device(launched(**{name: instead}), "operator", "float32") == "cpu"


def test_settings_of_nccl_are_refused_without_a_gpu():
    """A CPU does not exchange by NCCL."""
    with pytest.raises(ConfigFault, match=r"^launch\.nccl=.* needs GPUs: leave it empty$"):
        machine.training_device(launched(nccl={"NCCL_DEBUG": "INFO"}), "operator", "float32")


@pytest.mark.parametrize(
    ("capabilities", "installed", "told"),
    [
        ([], True, "needs a GPU"),
        ([(9, 0), (8, 0)], True, r"needs GPUs of compute capability 8\.9, found 8\.0"),
        ([(8, 9), (10, 0)], False, r"needs the extra: pip install -e '\.\[float8\]'"),
        ([(8, 9), (10, 0)], True, None),
    ],
)
def test_float8_takes_hardware_and_a_package(
    capabilities: list[tuple[int, int]], installed: bool, told: str | None, monkeypatch: pytest.MonkeyPatch
):
    """Float8 is refused, in one line with the remedy, without GPUs that can do it and without torchao."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(machine, "find_spec", lambda name: installed or None)
    if told is None:
        assert machine.training_device(launched(device="auto"), "steady", "float8") == "cuda"
        return
    with pytest.raises(ConfigFault, match=rf"^steady\.precision=float8 {told}; or set steady\.precision=bfloat16$"):
        machine.training_device(launched(device="auto"), "steady", "float8")


class FakeGpu:
    """NVML with one GPU, known by its UUID, whose counter advances by 3 kJ at each call."""

    NVMLError = OSError
    millijoules = 0

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return {"GPU-abc": 7}[uuid]

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> int:  # noqa: N802
        assert gpu == 7
        self.millijoules += 3_000_000
        return self.millijoules


def test_energy_is_that_of_the_gpu(monkeypatch: pytest.MonkeyPatch):
    """The counter of the process's own GPU, in kJ; a CPU has none."""
    fake = FakeGpu()
    fake.__spec__ = machinery.ModuleSpec("pynvml", None)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    gpu = torch.device("cuda", 0)
    assert processes.energy_kilojoules(gpu) == 3.0
    assert processes.energy_kilojoules(gpu) == 6.0
    assert processes.energy_kilojoules(torch.device("cpu")) is None


@pytest.mark.parametrize(
    "switches",
    [
        {"compile": "reduce-overhead", "sharding": "fsdp"},
        {"compile": "reduce-overhead", "activation_checkpointing": True},
    ]
    + [{"sharding": "fsdp-offload", "num_processes": 1}, {"sharding": "fsdp", "exchange_precision": "bfloat16"}],
)
def test_switches_that_exclude_each_other_are_refused(switches: dict):
    """CUDA graphs of tensors that move, shards of a single process, and shards exchanged in bfloat16 are refused."""
    with pytest.raises(ValidationError, match="needs"):
        launched(**switches)


def test_a_slow_first_call_is_no_part_of_the_time():
    """The first call, which may compile, is left out of the median of one further round."""
    calls = iter([0.2, 0.0])
    seconds = machine.in_turns({"compiled": lambda: time.sleep(next(calls))}, 1, torch.device("cpu"))
    assert seconds["compiled"] < 0.1


def test_a_slow_contender_is_timed_once(monkeypatch: pytest.MonkeyPatch):
    """After the warm-up a call of some seconds is timed once, and quick ones in every round."""
    called, clock = [], 0.0

    def run(name: str, seconds: float) -> None:
        nonlocal clock
        called.append(name)
        clock += seconds

    monkeypatch.setattr(machine, "now", lambda device: clock)
    contenders = {"solver": lambda: run("solver", 60.0), "model": lambda: run("model", 0.5)}
    assert machine.in_turns(contenders, 3, torch.device("cpu")) == {"solver": 60.0, "model": 0.5}
    assert called == ["solver", "model", "solver", "model", "model", "model"]


def test_of_the_rounds_the_median_counts(monkeypatch: pytest.MonkeyPatch):
    """One round that other programs slowed down changes no time, nor does the warm-up."""
    clock, taken = 0.0, iter([3.0, 0.1, 0.2, 4.0, 0.3, 0.1])

    def run() -> None:
        nonlocal clock
        clock += next(taken)

    monkeypatch.setattr(machine, "now", lambda device: clock)
    assert machine.in_turns({"model": run}, 5, torch.device("cpu"))["model"] == pytest.approx(0.2)


def test_rate_of_a_matrix_product():
    """The rate is that of 2 n^3 operations, which a core does at more than 100 million and less than 10^14 a second."""
    assert 1e8 < processes.matmul_rate(torch.device("cpu"), "float32") < 1e14
