"""Which contenders meet: the speed switches, the training-data path, checkpoints, and one rank against several."""

from typing import Any

Pair = dict[str, dict[str, Any]]

PLAIN_CONFIG = {"precision": "float32", "optimizer": "adamw"}
PLAIN_LAUNCH = {"compile": False, "activation_checkpointing": False, "micro_batch_tokens": None}
ALL_SWITCHES, SCALING, CHECKPOINTS = "speed_switches_over_plain", "scaling_{}_over_1", "checkpoint_overhead"
CHECKPOINTING = "activation_checkpointing_over_plain"
CACHE, CACHED_TRAINING = "cache_over_on_the_fly", "cached_training_over_on_the_fly_training"


def plain(families: list[str], threads: int) -> dict[str, Any]:
    """Float32, eager, fused AdamW: what every switch is held against."""
    return {"families": families, "threads": threads, "config": PLAIN_CONFIG, "launch": PLAIN_LAUNCH}


def switch_pairs(families: list[str]) -> dict[str, Pair]:
    """Each speed switch on and off, in one thread."""
    off = plain(families, 1)
    on = {
        "bfloat16_over_float32": {"config": PLAIN_CONFIG | {"precision": "bfloat16"}},
        "compile_over_eager": {"launch": PLAIN_LAUNCH | {"compile": True}},
        "muon_over_adamw": {"config": PLAIN_CONFIG | {"optimizer": "muon"}},
        CHECKPOINTING: {"launch": PLAIN_LAUNCH | {"activation_checkpointing": True}},
    }
    pairs = {name: {"value": off | change, "baseline": dict(off)} for name, change in on.items()}
    for side in pairs[CHECKPOINTING].values():
        side["is_weighed"] = True
    pairs["fused_over_foreach"] = {"value": off, "baseline": off | {"foreach": True}}
    pairs["prefetch_over_none"] = {"value": off, "baseline": off | {"prefetch": False}}
    return pairs


def all_switches_pair(families: list[str], model: dict[str, Any], batch_tokens: int) -> dict[str, Pair]:
    """Bfloat16, compiled and fused against none of them, for a model of another size, in one thread."""
    size = PLAIN_CONFIG | {"model": model, "batch_tokens": batch_tokens}
    off = plain(families, 1) | {"config": size}
    on = {"config": size | {"precision": "bfloat16"}, "launch": PLAIN_LAUNCH | {"compile": True}}
    return {ALL_SWITCHES: {"value": off | on, "baseline": off | {"foreach": True}}}


def loop_pair(families: list[str], threads: int) -> dict[str, Pair]:
    """Steps as they are taken in training, with and without the checkpoint and the log of one interval."""
    usual = {"families": families, "threads": threads}
    return {CHECKPOINTS: {"value": usual | {"saves": True}, "baseline": usual}}


def data_pairs(family: str, threads: int) -> dict[str, Pair]:
    """Batches from the latent cache and from raw files: delivered by one thread, and trained on."""
    deliver = plain([family], 1) | {"trains": False, "prefetch": False}
    train = plain([family], threads)
    return {
        CACHE: {"value": deliver, "baseline": deliver | {"on_the_fly": True}},
        CACHED_TRAINING: {"value": train, "baseline": train | {"on_the_fly": True}},
    }


def scaling_pairs(families: list[str], world_size: int, batch_tokens: int) -> dict[str, Pair]:
    """All ranks against rank 0 alone, one thread each: on the same global batch, and on the same batch per rank."""
    usual = plain(families, 1)
    name, alone = SCALING.format(world_size), usual | {"alone": True}
    larger = usual | {"config": PLAIN_CONFIG | {"batch_tokens": world_size * batch_tokens}}
    return {name: {"value": usual, "baseline": alone}, f"weak_{name}": {"value": larger, "baseline": alone}}
