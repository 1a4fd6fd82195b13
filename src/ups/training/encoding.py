"""Encoding of the latent cache by one process, or by the ranks of `torchrun ... -m ups.training.encoding RUN_DIR`.

The job's folder is that of the cache.
"""

from ups.runs.processes import die_with_parent, memory_bytes

if __name__ == "__main__":
    die_with_parent()

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ups.data.arrays import expect_stamps
from ups.data.encoding import Encode, Encoding
from ups.data.families import Dataset
from ups.data.latent_cache import write_manifest
from ups.data.latent_shards import scale_of
from ups.data.pdebench import FAMILIES
from ups.data.remote import SharedFolder
from ups.files import write_json
from ups.models.codec import Codec, codec_from, group_name
from ups.models.weights import load_model
from ups.runs.run import RESULT, Run
from ups.training.distributed import Ranks
from ups.training.inputs import encoder
from ups.training.process import run_rank

log = logging.getLogger(__name__)

MODULE = "ups.training.encoding"


def prepare(run: Run) -> tuple[Encoding, Codec]:
    """The cache that a run's codec makes of its datasets, with the arrays' metadata written."""
    codec: Codec = load_model(codec_from, run.data_root, run.inputs["codec"])
    described = run.inputs["datasets"]["datasets"]
    datasets = {name: Dataset.from_json(entry) for name, entry in described.items()}
    place = run.launch.latent_store
    store = SharedFolder(Path(place) / run.folder.name, run.folder) if place else None
    scales = {family: scale_of(tolerance) for family, tolerance in run.config["tolerance"].items()}
    encoding = Encoding(run.folder, datasets, codec.groups, scales, on_disk=run.config["on_disk"], store=store)
    encoding.prepare()
    return encoding, codec


def check_store(encoding: Encoding, codec: Codec, run: Run) -> None:
    """Check the store of a run's latents, if it has one, before anything is encoded; raises as `SharedFolder.check`."""
    if (store := encoding.store) is not None:
        store.check(_key(codec, run), [path for shard in encoding.shards for path in encoding.files(shard)])
        count = sum(store.has(encoding.files(shard)) for shard in encoding.shards)
        log.info("latents: %d of %d shards are in %s", count, len(encoding.shards), run.launch.latent_store)


def count_shards(encoding: Encoding) -> int:
    """How many shards are published."""
    return sum(encoding.path(shard).is_file() for shard in encoding.shards)


def encode_share(encoding: Encoding, encode: Encode, run: Run, ranks: Ranks, advance: Callable[[int], None]) -> None:
    """Write this rank's share of the shards."""
    assert run.raw is not None
    memory = memory_bytes(run.launch, ranks.device)
    share = {"rank": ranks.rank, "world_size": ranks.world_size}
    encoding.write_share(run.raw, encode, advance, memory_bytes=memory, stamps=run.stamps, **share)


def finish(encoding: Encoding, codec: Codec, run: Run) -> dict[str, Any]:
    """Write the manifest of a cache whose shards are all written; returns its receipt.

    Raises:
        DataFault: a raw file has changed meanwhile.
    """
    assert run.raw is not None
    expect_stamps(run.raw, run.stamps)
    datasets, key = run.inputs["datasets"], _key(codec, run)
    families = sorted({dataset.family for dataset in encoding.datasets.values()})
    token_grids = {family: list(codec.groups[group_name(family, "fields")].token_grid) for family in families}
    write_manifest(run.folder, key, encoding, datasets["splits"], token_grids, run.raw)
    return {
        "key": key,
        "codec": run.inputs["codec"],
        "steady": [family for family in families if FAMILIES[family].steady],
        "transient": [family for family in families if not FAMILIES[family].steady],
    }


def _key(codec: Codec, run: Run) -> dict[str, Any]:
    """What the latents are made from."""
    datasets = run.inputs["datasets"]
    return {
        "codec weights": run.inputs["codec"]["weights"],
        "normalization": {name: [group.log, group.mean, group.std] for name, group in codec.groups.items()},
        "source files": {name: file["md5"] for name, file in datasets["sources"].items()},
        "splits": datasets["fingerprint"],
        "options": run.config,
    }


def encode_on_rank(run: Run, ranks: Ranks) -> None:
    """The work of one rank, which gives a sign of life for everything it encodes, and while it waits for the others."""
    encoding, codec = prepare(run)
    encode, alive = encoder(codec, ranks.device), run.alive(ranks.rank)

    def encode_alive(u: Tensor, family: str, kind: str) -> Tensor:
        alive.touch()
        return encode(u, family, kind)

    encode_share(encoding, encode_alive, run, ranks, lambda _: alive.touch())
    ranks.wait_for_all(alive.touch)
    if ranks.rank == 0:
        write_json(run.folder / RESULT, {"shards": count_shards(encoding)})


if __name__ == "__main__":
    run_rank(encode_on_rank)
