"""Speed of stored data: encoding on one and two cores, batches from a cold page cache and of many trajectories.

Run as a module it is the worker that encodes a dataset alternately with one process and with two, on one core each.
"""

from ups.runs.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()

import collections
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from ups.config import BenchmarkConfig
from ups.data.latent_cache import LatentCache
from ups.data.latent_shards import Layout, shard_path, write_shard
from ups.data.samples import LatentSamples
from ups.files import num_cores, place_of, publish, read_json, write_json
from ups.performance.benchmark import Record, record
from ups.runs.machine import in_turns, medians
from ups.runs.run import REQUEST, RESULT, Run
from ups.runs.torchrun import run_query
from ups.training.distributed import Ranks
from ups.training.encoding import encode_share, prepare
from ups.training.inputs import encoder, entries_of, open_cache
from ups.training.process import run_rank
from ups.training.stage import batch_size

STORAGE_WORKER = "ups.performance.storage"
FEW, MANY = 100, 100_000  # trajectories
TINY = (2, 4, 4)  # snapshots, tokens and channels of each of them: reading their values costs next to nothing
NUM_BATCHES, BATCH_SIZE = 50, 32


def storage_records(run: Run, config: BenchmarkConfig) -> list[Record]:
    """All records; `run` is the operator's. Those that bind cores or empty the page cache are of Linux alone."""
    records = [_many_over_few(run, config)]
    if hasattr(os, "sched_setaffinity") and hasattr(os, "posix_fadvise"):
        records += [*_encoding(run, config), _first_batch(run, config), *_preloading(run, config)]
    return records


def _encoding(run: Run, config: BenchmarkConfig) -> list[Record]:
    """Raw megabytes per second of the first loading dataset: one process on one core against other ways to read it."""
    datasets = run.inputs["datasets"]
    family = config.loading_datasets[0].family
    chosen = {name: entry for name, entry in datasets["datasets"].items() if entry["family"] == family}
    num_processes = min(2, num_cores())
    how = {"num_processes": num_processes, "threads_per_process": 1, "latent_store": None}
    launch = run.launch.model_copy(update=how)
    inputs = {"codec": run.inputs["codec"], "datasets": datasets | {"datasets": chosen}}
    section = {"tolerance": {family: None}, "on_disk": True}
    place = {"folder": run.folder / "encoding", "config": section, "inputs": inputs, "launch": launch}
    found = run_query(STORAGE_WORKER, replace(run, device="cpu", **place), {"rounds": config.rounds})
    shutil.rmtree(run.folder / "encoding")
    speeds = {name: found["bytes"] / seconds / 1e6 for name, seconds in found["seconds"].items()}
    one = speeds.pop("encoding_1")
    others = ("cat", "h5py", "writing")
    records = [record(f"encoding_over_{other}", one, "MB/s, one core", speeds[other]) for other in others]
    if num_processes == 2:
        records.append(record("encoding_2_over_1_cores", speeds["encoding_2"], "MB/s", one))
    return records


def time_encoding(run: Run, ranks: Ranks) -> None:
    """Write the result {"bytes": of the raw file, "seconds": {contender: median}} of rank 0."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[ranks.rank]})
    torch.set_num_threads(1)
    (dataset,) = run.inputs["datasets"]["datasets"].values()
    assert run.raw is not None
    path = run.raw / dataset["files"][0]
    alive = run.alive(ranks.rank)
    contenders = {
        "cat": partial(
            _timed, ranks, 1, lambda: subprocess.run(["/bin/cat", path], stdout=subprocess.DEVNULL, check=True)
        ),
        "h5py": partial(_timed, ranks, 1, partial(_read_file, path)),
        "writing": partial(_timed, ranks, 1, partial(_write_file, run.folder / "zeros", path.stat().st_size)),
    } | {f"encoding_{n}": partial(_encode, run, ranks, n) for n in range(1, ranks.world_size + 1)}
    contenders = {name: partial(_alive, alive, contender) for name, contender in contenders.items()}
    seconds = medians(contenders, read_json(run.folder / REQUEST)["rounds"])
    if ranks.rank == 0:
        write_json(run.folder / RESULT, {"bytes": path.stat().st_size, "seconds": seconds})
    ranks.barrier()


def _alive(file: Path, contender: Callable[[], float]) -> float:
    """The seconds of a contender, before which the launcher gets a sign of life."""
    file.touch()
    return contender()


def _timed(ranks: Ranks, num_processes: int, work: Callable[[], object]) -> float:
    """Seconds until the first `num_processes` ranks have done their work, while the others wait."""
    ranks.barrier()
    started = time.perf_counter()
    if ranks.rank < num_processes:
        work()
    ranks.barrier()
    return time.perf_counter() - started


def _read_file(path: Path) -> None:
    """Read the trajectories of a file of layout `tensor` one after the other."""
    with h5py.File(path) as file:
        collections.deque(file["tensor"], maxlen=0)


def _write_file(path: Path, num_bytes: int) -> None:
    """Write a file and flush it to disk, which bounds how fast a cache of so many bytes can be written."""
    with publish(path) as temporary:
        temporary.write_bytes(bytes(num_bytes))


def _encode(run: Run, ranks: Ranks, num_processes: int) -> float:
    """Seconds in which this many ranks encode the dataset into a new cache, until it is on disk."""
    run = replace(run, folder=run.folder / "latents")
    if ranks.rank == 0:
        shutil.rmtree(run.folder, ignore_errors=True)
    ranks.barrier()
    own, (encoding, codec) = Ranks(ranks.rank, num_processes, ranks.device), prepare(run)
    encode = encoder(codec, ranks.device)
    return _timed(ranks, num_processes, partial(encode_share, encoding, encode, run, own, lambda _: None))


def _first_batch(run: Run, config: BenchmarkConfig) -> Record:
    """Seconds from opening the cache to the first batch, of the slowest family, with nothing in the page cache."""
    families = run.inputs["latent_cache"]["transient"]
    contenders = {family: partial(_cold, run, family, num_batches=1, preload=True) for family in families}
    return record("first_cold_batch_seconds", max(medians(contenders, config.rounds).values()), "s")


def _preloading(run: Run, config: BenchmarkConfig) -> list[Record]:
    """Samples per second of a pass over all samples that starts cold: read ahead, against read when they are used."""
    records = []
    for family in (dataset.family for dataset in config.loading_datasets):
        timed = partial(_cold, run, family, num_batches=None)
        seconds = medians({str(ahead): partial(timed, preload=ahead) for ahead in (True, False)}, config.rounds)
        count = LatentSamples(open_cache(run, "transient"), "train").num_samples[family]
        ahead, mapped = count / seconds["True"], count / seconds["False"]
        records.append(record(f"preloaded_over_mapped_{family}", ahead, "samples/s", mapped))
    return records


def _cold(run: Run, family: str, *, num_batches: int | None, preload: bool) -> float:
    """Seconds to open a family's cache and load batches in random order, by default all, when none was read before."""
    _forget(place_of(run.data_root, run.inputs["latent_cache"]))
    started = time.perf_counter()
    run = replace(run, launch=run.launch.model_copy(update={"preload_latents": False}))
    cache = open_cache(run, "transient").only(family)
    if preload:
        cache.preload()
    samples = LatentSamples(cache, "train")
    size = batch_size(run.config["batch_tokens"], samples.num_tokens[family], run.config["batch_multiple"])
    order = np.random.default_rng(run.config["seed"]).permutation(samples.num_samples[family])
    for first in range(0, len(order), size)[:num_batches]:
        samples.load(family, order[first : first + size])
    return time.perf_counter() - started


def _forget(cache: Path) -> None:
    """Remove a cache from the page cache, and what is remembered of verified checksums."""
    for path in cache.rglob("*.verified"):
        path.unlink()
    for path in filter(Path.is_file, cache.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _many_over_few(run: Run, config: BenchmarkConfig) -> Record:
    """Seconds of batches from 100,000 trajectories against 100, tiny ones."""
    family = config.loading_datasets[0].family
    entry = entries_of(open_cache(run, "transient"), family)[0]
    contenders: dict[str, Callable[[], object]] = {}
    for count in (FEW, MANY):
        samples = tiny_samples(run.folder / f"tiny{count}", entry, count)
        contenders[str(count)] = partial(_load_batches, samples, family, np.random.default_rng(config.seed))
    seconds = in_turns(contenders, config.rounds, torch.device("cpu"))
    for count in (FEW, MANY):
        shutil.rmtree(run.folder / f"tiny{count}")
    few, many = (seconds[str(count)] / NUM_BATCHES for count in (FEW, MANY))
    return record("batch_of_100000_over_100_trajectories", many, f"s, {BATCH_SIZE} samples", few)


def tiny_samples(folder: Path, entry: dict[str, Any], count: int) -> LatentSamples:
    """Samples of `count` tiny trajectories, all in one shard."""
    layout, (num_snapshots, num_tokens, channels) = Layout((count, *TINY), None, 1), TINY
    z = np.random.default_rng(0).standard_normal((num_snapshots, num_tokens, channels), np.float32)
    write_shard(shard_path(folder / "tiny.zarr/fields", 0, 0), layout, enumerate([layout.pack(z)] * count))
    arrays, split = {"fields": asdict(layout)}, {"train": list(range(count))}
    tiny = entry | {"arrays": arrays, "token_grid": [num_tokens], "split": split}
    families = [entry["dataset"]["family"]]
    cache = LatentCache(folder, {"datasets": {"tiny": tiny}, "families": families})
    for index in range(count):
        cache.read("tiny", "fields", index)  # verifies its checksum, which is done once
    return LatentSamples(cache, "train")


def _load_batches(samples: LatentSamples, family: str, rng: np.random.Generator) -> None:
    for _ in range(NUM_BATCHES):
        samples.load(family, samples.draw(family, BATCH_SIZE, rng))


if __name__ == "__main__":
    run_rank(time_encoding)
