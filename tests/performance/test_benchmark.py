import json
import math
import re
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from tests.training.jobs import launched
from ups.data.samples import LatentSamples
from ups.evaluation.styles import png
from ups.files import num_cores
from ups.metrics.spectra import error_spectra
from ups.performance.benchmark import (
    gpu_comparisons,
    loop_records,
    looped_spectrum,
    record,
    scaling_comparisons,
    throughput,
)
from ups.performance.report import GREEN, GREY, RED, benchmark_figure, benchmark_text
from ups.performance.timing_worker import Setup, encoded_on_the_fly
from ups.runs.run import Run
from ups.training.inputs import open_cache

NAMES = {
    "samples_per_second",
    "step_seconds",
    "data_wait_fraction",
    "checkpoint_overhead",
    *(
        f"{model}{batch}scaling_{ranks}_over_1{exchange}"
        for model, batch, ranks, exchange in product(
            ("", "large_model_"), ("", "weak_"), (2, 4), ("", "_bfloat16_exchange", "_without_exchange")
        )
        if not model or ranks <= num_cores()
    ),
    "first_step_over_import_torch",
    "resume_seconds",
    *(
        f"{name}_{family}"
        for name in ("cache_over_on_the_fly", "cached_training_over_on_the_fly_training", "preloaded_over_mapped")
        for family in ("advection_1d", "diffusion_reaction_2d")
    ),
    "data_wait_fraction_2_ranks",
    "data_wait_fraction_4_ranks",
    "encoding_over_cat",
    "encoding_over_h5py",
    "encoding_over_writing",
    *(["encoding_2_over_1_cores"] if num_cores() > 1 else []),
    "first_cold_batch_seconds",
    "batch_of_100000_over_100_trajectories",
    "speed_switches_over_plain",
    "bfloat16_over_float32",
    "compile_over_eager",
    "fused_over_foreach",
    "muon_over_adamw",
    "activation_checkpointing_over_plain",
    "activation_checkpointing_memory_over_plain",
    "prefetch_over_none",
    "exported_pt2_step_over_eager",
    "exported_onnx_step_over_eager",
    "fRMSE_of_snapshot_over_loop",
    "fRMSE_of_trajectory_over_loop",
}
MACHINE = {"cpu", "cores", "memory_gib", "gpu", "torch", "python", "threads", "date", "seed", "git"}


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _benchmark(data_root: Path) -> dict[str, Any]:
    text = (data_root / "08_reporting/benchmark.json").read_text()
    return json.loads(text, parse_constant=_refuse)


@pytest.mark.slow
def test_every_record_is_there(measured: Path):
    """The benchmark names each record once, with its five keys and nothing that is no number."""
    records = _benchmark(measured)["records"]
    assert sorted(entry["name"] for entry in records) == sorted(NAMES)
    for entry in records:
        assert list(entry) == ["name", "value", "unit", "baseline", "ratio"]
        assert math.isfinite(entry["value"])
        if entry["baseline"] is not None:
            assert entry["ratio"] == pytest.approx(entry["value"] / entry["baseline"])


@pytest.mark.slow
def test_the_machine_is_described(measured: Path):
    """Numbers come with a description of the machine on which they were measured."""
    machine = _benchmark(measured)["machine"]
    assert set(machine) >= MACHINE
    assert machine["cores"] > 0 and machine["memory_gib"] > 0


@pytest.mark.slow
def test_the_benchmark_is_reported(measured: Path):
    """A table with every record and a figure lie beside the numbers."""
    folder = measured / "08_reporting/benchmark"
    text = re.sub(" +", " ", (folder / "benchmark.md").read_text())
    assert all(f"| {name} |" in text for name in NAMES)
    assert (folder / "benchmark.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_batches_on_the_fly_are_those_of_the_cache(latents: tuple[Path, dict[str, Any]]):
    """Both ways of delivering a batch give the same latents, coefficients and conditions bit for bit."""
    root, receipts = latents
    run = Run(root, "operator", "", {}, receipts, launched(), "cpu", root)
    cached = LatentSamples(open_cache(run, "transient", "steady"), "train")
    encoded = encoded_on_the_fly(cached, run)
    for family, count in cached.num_samples.items():
        samples = np.array([0, count - 1, count // 2])
        one, other = cached.load(family, samples), encoded.load(family, samples)
        assert one.domain == other.domain
        for name in ("z", "z_next", "coefficients", "condition"):
            assert torch.equal(getattr(one, name), getattr(other, name))


def test_the_loop_over_modes_gives_the_same_spectrum():
    """The loop over modes, with which `error_spectra` is timed, computes the same shells."""
    error = torch.randn(2, 3, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(looped_spectrum(error), error_spectra(error)[1])


def _side(seconds: list[float], **facts: Any) -> dict[str, Any]:
    rounds = [{"seconds": s, "waited": 0.01 * s, "samples": 20.0, "steps": 10} for s in seconds]
    return {"rounds": rounds, "peak_bytes": None, "eager_because": None} | facts


def test_ratios_are_of_medians():
    """One disturbed round has no effect: 20 samples in 2 s against 20 in 4 s are twice as fast."""
    found = throughput("bfloat16_over_float32", {"value": _side([2.0, 2.0, 90.0]), "baseline": _side([4.0, 4.0, 0.1])})
    assert found == {
        "name": "bfloat16_over_float32",
        "value": 10.0,
        "unit": "samples/s",
        "baseline": 5.0,
        "ratio": 2.0,
    }


def test_a_model_that_was_not_compiled_is_reported_as_such():
    """Where the compiler fails, the unit of the record says that the model is eager."""
    value = _side([1.0], eager_because="no compiler")
    found = throughput("compile_over_eager", {"value": value, "baseline": _side([1.0])})
    assert found["unit"] == "samples/s, not compiled: no compiler"


def test_checkpoint_overhead_is_of_an_interval():
    """A checkpoint that costs 0.5 s among 100 steps of 0.1 s costs 5 %, however few steps were measured."""
    sides = {"value": _side([1.5, 2.5, 1.5]), "baseline": _side([1.0, 2.0, 1.0])}
    found = {entry["name"]: entry["value"] for entry in loop_records("checkpoint_overhead", sides, 100)}
    assert found["checkpoint_overhead"] == pytest.approx(0.05)
    assert found["step_seconds"] == pytest.approx(0.1)
    assert found["samples_per_second"] == pytest.approx(20.0)
    assert found["data_wait_fraction"] == pytest.approx(0.01)


def test_report_shows_numbers_without_baseline():
    """A record without a baseline has empty cells, and the figure is drawn with and without such records."""
    machine = {"cpu": "one", "cores": 1, "gpu": None, "torch": "2"}
    records = [record("faster", 3.0, "samples/s", 1.5), record("alone", 2500.0, "s")]
    found = {"machine": machine, "records": records}
    text = re.sub(" +", " ", benchmark_text(found))
    assert "| faster | 3 | 1.5 | 2 | samples/s |" in text
    assert "| alone | 2,500 | | | s |" in text
    assert png(benchmark_figure(found)).startswith(b"\x89PNG")


def test_bars_are_green_where_the_value_is_better():
    """Twice as fast is green and half red; half the memory is green; units of time and what is equal are grey."""
    machine = {"cpu": "one", "cores": 1, "gpu": None, "torch": "2"}
    ratios = {"faster": 2.0, "slower": 0.5, "resume_seconds": 2.0, "equal": 1.01}
    ratios["activation_checkpointing_memory_over_plain"] = 0.5
    records = [record(name, ratio, "samples/s", 1.0) for name, ratio in ratios.items()]
    bars = benchmark_figure({"machine": machine, "records": records}).axes[0].patches
    assert [to_hex(bar.get_facecolor()) for bar in bars] == [GREEN, RED, GREY, GREY, GREEN]


def test_weak_scaling_has_a_batch_for_each_rank():
    """On four ranks the same batch is shared, or each rank has as many tokens as rank 0 has alone."""
    comparisons = scaling_comparisons(["burgers_1d"], 4, {"batch_tokens": 100})
    strong, weak = comparisons["scaling_4_over_1"], comparisons["weak_scaling_4_over_1"]
    assert strong["value"]["config"]["batch_tokens"] == 100 and weak["value"]["config"]["batch_tokens"] == 400
    for both in (strong, weak):
        assert both["baseline"]["rank_0_only"] and both["baseline"]["config"]["batch_tokens"] == 100


@pytest.mark.parametrize("missing", [None, "a GPU"])
def test_switches_of_gpus_are_compared_where_they_work(missing: str | None, monkeypatch: pytest.MonkeyPatch):
    """CUDA graphs everywhere and float8 where nothing is missing, each against compiled bfloat16; one change each."""
    monkeypatch.setattr("ups.performance.benchmark.float8_needs", lambda num_gpus: missing)
    compared = gpu_comparisons(["burgers_1d"], {"num_layers": 2}, 512)
    assert list(compared) == ["cuda_graphs_over_compile", *(["float8_over_bfloat16"] if missing is None else [])]
    for both in compared.values():
        value, baseline = (asdict(Setup(**both[side])) for side in ("value", "baseline"))
        assert baseline["launch"]["compile"] is True and baseline["config"]["precision"] == "bfloat16"
        assert len([name for name in value if value[name] != baseline[name]]) == 1


def test_the_bound_of_scaling_lacks_only_the_exchange():
    """What bounds the scaling is the same comparison, in which the ranks exchange nothing."""
    comparisons = scaling_comparisons(["burgers_1d"], 2, {"batch_tokens": 100})
    for name in ("scaling_2_over_1", "weak_scaling_2_over_1"):
        with_exchange, without = comparisons[name], comparisons[f"{name}_without_exchange"]
        assert without["value"] == with_exchange["value"] | {"exchange": False}
        assert without["baseline"] == with_exchange["baseline"]
