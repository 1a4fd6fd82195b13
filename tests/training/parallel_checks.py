"""What `test_parallel` asserts, computed on several gloo ranks: `parallel_checks.py RANK WORLD_SIZE FOLDER`."""

import copy
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ups.data.loader import LatentBatch
from ups.models.domain import Domain
from ups.models.operator import Operator
from ups.training.distributed import Ranks
from ups.training.parallel import (
    Sharding,
    check_gradients_agree,
    clip_gradients,
    exchanging,
    abandon,
    full_optimizer_state,
    full_state,
    load_full_optimizer_state,
    load_full_state,
    local,
    parallelize,
    settle,
)

DOMAINS = Domain(0, (12,), (True,)), Domain(1, (4, 6), (True, False))
BATCH_SIZE = 24
ALONE = Ranks(0, 1, torch.device("cpu"))
Gradients = dict[str, Tensor]


def operator() -> Operator:
    """A small operator of which every weight matters."""
    torch.manual_seed(0)
    made = Operator(
        num_families=2,
        latent_channels=4,
        coefficient_channels=2,
        num_conditions=3,
        hidden_channels=10,
        num_layers=3,
        modes=3,
    )
    made.amplitude.change.copy_(torch.rand(2, 4) + 0.5)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.1)
    return made


def batch_of(step: int, share: slice) -> LatentBatch:
    """A share of the synthetic batch of a step; 1D and 2D alternate."""
    domain, generator = DOMAINS[step % 2], torch.Generator().manual_seed(step)
    tokens = torch.Size(domain.grid).numel()
    shapes = (tokens, 4), (tokens, 4), (tokens, 2), (3,)
    values = (torch.randn(BATCH_SIZE, *shape, generator=generator)[share] for shape in shapes)
    return LatentBatch(domain, *values)


def losses(model: nn.Module, plain: Operator, batch: LatentBatch) -> Tensor:
    """The operator's loss per sample (B,), which reads the plain model's buffers."""
    unit = plain.amplitude.unit(batch.z, batch.domain)
    z_pred = model(batch.z, batch.coefficients, batch.condition, batch.domain)
    return ((z_pred - batch.z_next) / unit).square().flatten(1).mean(1)


def shares(ranks: Ranks, accumulation: int) -> Iterator[tuple[slice, bool]]:
    """The micro-batches of this rank's share of a batch, and whether it is the last."""
    share = ranks.share(BATCH_SIZE)
    for i in range(accumulation):
        part = Ranks(i, accumulation, ranks.device).share(share.stop - share.start)
        yield slice(share.start + part.start, share.start + part.stop), i + 1 == accumulation


def backward(model: nn.Module, plain: Operator, step: int, ranks: Ranks, accumulation: int = 1) -> None:
    """Add the gradients of a global batch, as the training loop does."""
    for share, last in shares(ranks, accumulation):
        with exchanging(model, last):
            values = losses(model, plain, batch_of(step, share))
            (values.sum() * (ranks.world_size / BATCH_SIZE)).backward()


def gradients(plain: Operator) -> Gradients:
    """Whole gradients by name."""
    whole = {name: p.grad for name, p in plain.named_parameters()}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for name, g in whole.items()}


def expected(step: int) -> Gradients:
    """The gradients that one process computes."""
    plain = operator()
    backward(plain, plain, step, ALONE)
    return gradients(plain)


def gap(one: Gradients, other: Gradients) -> float:
    """The largest relative difference of two sets of tensors."""
    assert one.keys() == other.keys()
    return max(((one[name] - other[name]).norm() / other[name].norm().clamp(min=1e-12)).item() for name in other)


def prepared(ranks: Ranks, sharding: Sharding, compiled: str | None = None) -> tuple[Operator, nn.Module]:
    """The plain and the parallel operator, settled."""
    plain = operator()
    if compiled is not None:
        for block in plain.mixer.blocks:
            block.compile(backend=compiled)
    parallel = parallelize(plain, ranks, sharding)
    settle(parallel, lambda: backward(parallel, plain, 0, ranks))
    return plain, parallel


def gradient_gap(ranks: Ranks, sharding: Sharding, accumulation: int = 1, compiled: str | None = None) -> float:
    plain, parallel = prepared(ranks, sharding, compiled)
    gaps = []
    for step in range(4):
        backward(parallel, plain, step, ranks, accumulation)
        gaps.append(gap(gradients(plain), expected(step)))
        parallel.zero_grad(set_to_none=True)
    return max(gaps)


def skip_gap(ranks: Ranks, sharding: Sharding, settled: bool, sync: bool) -> float:
    plain = operator()
    parallel = parallelize(plain, ranks, sharding)
    if settled:
        settle(parallel, lambda: backward(parallel, plain, 0, ranks))
    gaps = []
    for step in range(6):
        if step in (0, 1, 4):
            with exchanging(parallel, sync):
                losses(parallel, plain, batch_of(step, ranks.share(BATCH_SIZE)))
            abandon(parallel)
        backward(parallel, plain, step, ranks)
        gaps.append(gap(gradients(plain), expected(step)))
        check_gradients_agree(parallel, ranks)
        parallel.zero_grad(set_to_none=True)
    return max(gaps)


def optimizer_of(plain: nn.Module) -> torch.optim.Optimizer:
    matrices, vectors = ([p for p in plain.parameters() if (p.ndim >= 2) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.98), fused=True)


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=10)
    )
    ranks = Ranks(rank, world_size, torch.device("cpu"))
    for name, check in {
        "ddp": lambda: gradient_gap(ranks, "ddp"),
        "ddp acc": lambda: gradient_gap(ranks, "ddp", 4),
        "fsdp": lambda: gradient_gap(ranks, "fsdp"),
        "fsdp acc": lambda: gradient_gap(ranks, "fsdp", 4),
        "ddp eager": lambda: gradient_gap(ranks, "ddp", 2, "eager"),
        "fsdp eager": lambda: gradient_gap(ranks, "fsdp", 2, "eager"),
        "ddp aot": lambda: gradient_gap(ranks, "ddp", 2, "aot_eager"),
        "fsdp aot": lambda: gradient_gap(ranks, "fsdp", 2, "aot_eager"),
        "skip fsdp": lambda: skip_gap(ranks, "fsdp", True, True),
        "skip fsdp nosync": lambda: skip_gap(ranks, "fsdp", True, False),
        "skip ddp settled": lambda: skip_gap(ranks, "ddp", True, True),
        "skip ddp settled nosync": lambda: skip_gap(ranks, "ddp", True, False),
        "skip ddp unsettled nosync": lambda: skip_gap(ranks, "ddp", False, False),
        "skip ddp unsettled": lambda: skip_gap(ranks, "ddp", False, True),
    }.items():
        t = time.time()
        try:
            r = check()
        except Exception:
            r = traceback.format_exc()[-1500:]
        if rank == 0:
            print(name, r, f"{time.time() - t:.2f}s", flush=True)


main()
