"""What `test_parallel` asserts, on several gloo ranks: `-m tests.training.parallel_checks RANK WORLD_SIZE FOLDER`.

Each rank leaves FOLDER/RANK.json: for every check what it returned, or where it failed.
"""

import contextlib
import copy
import functools
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.backbones import small
from tests.training.jobs import section
from ups.data.samples import LatentBatch
from ups.errors import Unsynchronised
from ups.models.operator import Operator
from ups.models.sizes import Domain, Sizes
from ups.training.distributed import MESSAGE_BYTES, Ranks, check_ranks
from ups.training.optimizers import make_optimizer
from ups.training.parallel import (
    Sharding,
    check_gradients_agree,
    clip_gradients,
    discard_step,
    full_optimizer_state,
    full_state,
    gradient_sync,
    load_full_optimizer_state,
    load_full_state,
    local_shards,
    parallelize,
)

DOMAINS = Domain("advection_1d", (12,), (True,)), Domain("burgers_1d", (4, 6), (True, False))
BATCH_SIZE = 25  # not a multiple of the number of ranks
CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)
SECONDS_PER_COLLECTIVE = 15
BUCKET_MEGABYTES = 0.03  # several buckets
State = dict[str, Tensor]
Check = Callable[[], float | bool | str]


def operator() -> Operator:
    """An operator of which every weight matters, large enough for several buckets."""
    torch.manual_seed(0)
    sizes = Sizes(
        families=("advection_1d", "burgers_1d"),
        num_axes=(1, 2),
        num_fields=(1, 2),
        latent_channels=(4, 4),
        coefficient_channels=(2, 2),
        num_conditions=3,
    )
    made = Operator(sizes, small(hidden_channels=(32, 32, 32), num_layers=3, modes=(3, 3, 3)))
    made.statistics.step_rms.copy_(torch.rand(2, 4) + 0.5)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.1)
    return made


def batch_of(step: int, share: slice) -> LatentBatch:
    """A share of the synthetic batch of a step; 1D and 2D alternate."""
    domain, generator = DOMAINS[step % 2], torch.Generator().manual_seed(step)
    tokens = torch.Size(domain.grid).numel()
    shapes = (tokens, 4), (tokens, 4), (tokens, 2), (3,)
    return LatentBatch(domain, *(torch.randn(BATCH_SIZE, *shape, generator=generator)[share] for shape in shapes))


@dataclass(frozen=True)
class Setup:
    """An operator, spread over ranks."""

    ranks: Ranks
    operator: Operator
    exchange: torch.dtype

    def losses(self, step: int, share: slice, target_from_student: bool = False, horizon: int = 1) -> Tensor:
        """Loss per sample (B,); reads buffers of the plain model; like a consistency loss if `target_from_student`."""
        batch = batch_of(step, share)
        z_pred = batch.z
        for _ in range(horizon):
            z_pred = self.operator(z_pred, batch.coefficients, batch.condition, batch.domain)
        z_next = batch.z_next
        if target_from_student:
            with torch.no_grad():
                z_next = self.operator(0.9 * batch.z, batch.coefficients, batch.condition, batch.domain)
        unit = self.operator.statistics.expected_change(batch.z, batch.domain)
        return ((z_pred - z_next) / unit).square().flatten(1).mean(1)

    def backward(self, step: int, accumulation: int = 1, **loss: int) -> None:
        """Add the gradients of a global batch, as the training loop does."""
        whole = self.ranks.share(BATCH_SIZE)
        for i in range(accumulation):
            part = Ranks(i, accumulation, CPU).share(whole.stop - whole.start)
            with gradient_sync(self.operator, self.ranks, i + 1 == accumulation, BUCKET_MEGABYTES, self.exchange):
                values = self.losses(step, slice(whole.start + part.start, whole.start + part.stop), **loss)
                (values.sum() * (self.ranks.world_size / BATCH_SIZE)).backward()

    def gradients(self) -> State:
        """Whole gradients by name, which are forgotten."""
        gradients = {name: p.grad for name, p in self.operator.named_parameters() if p.grad is not None}
        whole = {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in gradients.items()}
        self.operator.zero_grad(set_to_none=True)
        return whole


def spread(ranks: Ranks, sharding: Sharding, compiled: bool = False, exchange: torch.dtype = torch.float32) -> Setup:
    """An operator spread over ranks."""
    setup = Setup(ranks, operator(), exchange)
    for block in blocks_of(setup) if compiled else ():
        block.compile(backend="eager")
    parallelize(setup.operator, ranks, sharding)
    return setup


def blocks_of(setup: Setup) -> list[nn.Module]:
    """All blocks, of the first family first."""
    return [block for trunk in setup.operator.mixer.trunks for block in trunk.blocks]


@functools.cache
def expected(step: int, **loss: int) -> State:
    """The gradients that one process computes."""
    setup = spread(ALONE, "ddp")
    setup.backward(step, **loss)
    return setup.gradients()


def gap(one: State, other: State) -> float:
    """The largest relative difference of two sets of tensors."""
    assert one.keys() == other.keys()
    return max(((one[name] - other[name]).norm() / other[name].norm().clamp(min=1e-12)).item() for name in other)


def gradient_gap(setup: Setup, accumulation: int = 1, steps: tuple[int, ...] = (0, 1), **loss: int) -> float:
    """How far gradients are from those of one process, for a 1D and a 2D batch."""
    gaps = []
    for step in steps:
        setup.backward(step, accumulation, **loss)
        gaps.append(gap(setup.gradients(), expected(step, **loss)))
    return max(gaps)


def unrolled_gap(setup: Setup) -> float:
    """As `gradient_gap`, the worst of horizons that grow from 1 to 3 and fall back, whole and in micro-batches."""
    cases = [(h, accumulation) for h in (1, 2, 3, 1) for accumulation in (1, 4)]
    return max(gradient_gap(setup, accumulation, horizon=h) for h, accumulation in cases)


def gap_after_giving_up(setup: Setup, failing: tuple[int, ...], where: str, exchange: bool) -> float:
    """As `gradient_gap` when steps are given up, for `failing` ranks ran out of memory in the second block."""
    armed = False

    def fail(*_: object) -> None:
        if armed:
            raise torch.OutOfMemoryError

    for trunk in setup.operator.mixer.trunks:
        if where == "forward":
            trunk.blocks[1].register_forward_pre_hook(fail)
        else:
            trunk.blocks[1].register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
    gaps = []
    for step in range(2):
        armed = setup.ranks.rank in failing
        with (
            gradient_sync(setup.operator, setup.ranks, exchange, BUCKET_MEGABYTES, setup.exchange),
            contextlib.suppress(torch.OutOfMemoryError),
        ):
            values = setup.losses(step, setup.ranks.share(BATCH_SIZE))
            if where == "backward":
                values.sum().backward()
        armed = False
        discard_step(setup.operator)
        gaps.append(gradient_gap(setup, accumulation=2))
    return max(gaps)


class Training:
    """Steps of AdamW and Muon with clipping and a moving average; all of it can be saved and continued elsewhere."""

    def __init__(self, ranks: Ranks, sharding: Sharding) -> None:
        start = operator().state_dict()
        average = copy.deepcopy(operator()).requires_grad_(False)
        self.setup, self.average = spread(ranks, sharding), average
        parallelize(average, ranks, sharding)
        load_full_state(self.setup.operator, start)
        self.optimizer = make_optimizer(self.setup.operator, section(optimizer="muon", weight_decay=0.1))

    def run(self, steps: range) -> None:
        """Train on the batches of `steps`."""
        for step in steps:
            self.setup.backward(step)
            clip_gradients(self.setup.operator.parameters(), max_norm=1.0)
            self.optimizer.step(0.01, torch.tensor(0.0))
            self.optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_lerp_(
                    local_shards(self.average.parameters()), local_shards(self.setup.operator.parameters()), 0.1
                )

    def save(self) -> bytes:
        """The state as a file holds it."""
        parts = {"model": full_state(self.setup.operator), "average": full_state(self.average)}
        file = io.BytesIO()
        for name, part in self.optimizer.parts.items():
            parts[name] = full_optimizer_state(self.setup.operator, part)
        torch.save(parts, file)
        return file.getvalue()

    def load(self, file: bytes) -> None:
        """Continue from a saved state."""
        state = torch.load(io.BytesIO(file), weights_only=True)
        load_full_state(self.setup.operator, state["model"])
        load_full_state(self.average, state["average"])
        for name, part in self.optimizer.parts.items():
            load_full_optimizer_state(self.setup.operator, part, state[name])

    def tensors(self) -> State:
        """Every tensor of the state."""
        state = torch.load(io.BytesIO(self.save()), weights_only=True)
        parts = {part: state[part] for part in ("model", "average")}
        for name in self.optimizer.parts:
            parts |= {f"{name}/{parameter}": moments for parameter, moments in state[name]["state"].items()}
        return {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}


@functools.cache
def undisturbed() -> State:
    """What one process has after four steps."""
    training = Training(ALONE, "ddp")
    training.run(range(4))
    return training.tensors()


def handover_gap(before: Training, after: Training) -> float:
    """How far two steps here, two steps there are from four steps on one process."""
    before.run(range(2))
    after.load(before.save())
    after.run(range(2, 4))
    return gap(after.tensors(), undisturbed())


def resumes_exactly(ranks: Ranks) -> bool:
    """Whether a new start from a saved state repeats what followed it, bit by bit."""
    first, second = Training(ranks, "ddp"), Training(ranks, "ddp")
    first.run(range(3))
    second.load(first.save())
    for training in (first, second):
        training.run(range(3, 7))
    again = second.tensors()
    return all(torch.equal(value, again[name]) for name, value in first.tensors().items())


def norm_gap(setup: Setup) -> float:
    """Relative error of the norm that clipping returns, and of the norm that it leaves."""
    setup.backward(0)
    reference = torch.stack([g.norm() for g in expected(0).values()]).norm()
    norm = clip_gradients(setup.operator.parameters(), max_norm=0.1)
    left = torch.stack([g.norm() for g in setup.gradients().values()]).norm()
    return max(abs(norm / reference - 1).item(), abs(left / 0.1 - 1).item())


def complaint(setup: Setup, tamper: Callable[[Setup], None]) -> str:
    """What the comparison of gradients says when ranks agreed first and then `tamper` came in between."""
    setup.backward(0)
    check_gradients_agree(setup.operator, setup.ranks)
    tamper(setup)
    try:
        check_gradients_agree(setup.operator, setup.ranks)
    except Unsynchronised as fault:
        return str(fault)
    return ""


def alter_on_rank_1(setup: Setup) -> None:
    """Change the last bit of one gradient on one rank."""
    if setup.ranks.rank == 1:
        gradient = blocks_of(setup)[1].mlp.first.bias.grad
        gradient[3] = gradient[3].nextafter(gradient[3] + 1)


def bypass(setup: Setup) -> None:
    """Differentiate without gradient_sync gradients."""
    setup.losses(1, setup.ranks.share(BATCH_SIZE)).sum().backward()


def bandwidths(ranks: Ranks) -> dict[int, float]:
    """Gigabytes per second of a sum over all ranks, by its bytes."""
    return check_ranks(ranks, "float32")["all_reduce_gigabytes_per_second"]


class Deaf(Ranks):
    """The last rank does not add what it receives."""

    def all_reduce(self, value: Tensor) -> Tensor:
        total = super().all_reduce(value)
        return value if self.rank == self.world_size - 1 else total


def wrong_sum(ranks: Ranks) -> str:
    """How `check_ranks` complains about a rank with a wrong sum."""
    try:
        check_ranks(Deaf(ranks.rank, ranks.world_size, ranks.device), "float32")
    except Unsynchronised as error:
        return str(error)
    return "silent"


def on_any_ranks(ranks: Ranks) -> dict[str, Check]:
    """What holds for both shardings on any number of ranks."""
    checks: dict[str, Check] = {}
    for sharding in ("ddp", "fsdp"):
        ready = functools.partial(spread, ranks, sharding)
        checks |= {
            f"gradients {sharding}": lambda ready=ready: gradient_gap(ready()),
            f"accumulated {sharding}": lambda ready=ready: gradient_gap(ready(), accumulation=4),
            f"norm {sharding}": lambda ready=ready: norm_gap(ready()),
        }
    rounded = functools.partial(spread, ranks, "ddp", exchange=torch.bfloat16)
    return checks | {"bfloat16": lambda: gradient_gap(rounded(), accumulation=4)}


def on_two_ranks(ranks: Ranks) -> dict[str, Check]:
    """What is slow to compute, and moves between numbers of ranks and shardings."""
    one, many = functools.partial(Training, ALONE), functools.partial(Training, ranks)
    return {
        "target from student ddp": lambda: gradient_gap(spread(ranks, "ddp"), target_from_student=True),
        "target from student fsdp": lambda: gradient_gap(spread(ranks, "fsdp"), target_from_student=True),
        "unrolled ddp": lambda: unrolled_gap(spread(ranks, "ddp")),
        "unrolled fsdp": lambda: unrolled_gap(spread(ranks, "fsdp")),
        "compiled ddp": lambda: gradient_gap(spread(ranks, "ddp", compiled=True), steps=(0,)),
        "compiled fsdp": lambda: gradient_gap(spread(ranks, "fsdp", compiled=True), steps=(0,)),
        "one to ddp": lambda: handover_gap(one("ddp"), many("ddp")),
        "ddp to fsdp": lambda: handover_gap(many("ddp"), many("fsdp")),
        "fsdp to one": lambda: handover_gap(many("fsdp"), one("ddp")),
        "ddp to fsdp-offload": lambda: handover_gap(many("ddp"), many("fsdp-offload")),
        "fsdp-offload to one": lambda: handover_gap(many("fsdp-offload"), one("ddp")),
        "one to fsdp": lambda: handover_gap(one("ddp"), many("fsdp")),
    }


def on_three_ranks(ranks: Ranks) -> dict[str, Check]:
    """What depends on the order of sums over ranks, or on one rank that differs from two others."""
    ddp, fsdp = functools.partial(spread, ranks, "ddp"), functools.partial(spread, ranks, "fsdp")
    everyone = tuple(range(ranks.world_size))
    return {
        "rates": lambda: len(check_ranks(ranks, "float32")["matmul_rates"]),
        "bandwidths": lambda: min(bandwidths(ranks)[size] for size in MESSAGE_BYTES),
        "wrong sum": lambda: wrong_sum(ranks),
        "given up ddp": lambda: gap_after_giving_up(ddp(), (), "forward", exchange=True),
        "forward failed ddp": lambda: gap_after_giving_up(ddp(), (1,), "forward", exchange=True),
        "early forward failed ddp": lambda: gap_after_giving_up(ddp(), (1,), "forward", exchange=False),
        "early backward failed ddp": lambda: gap_after_giving_up(ddp(), (1,), "backward", exchange=False),
        "given up fsdp": lambda: gap_after_giving_up(fsdp(), (), "forward", exchange=True),
        "forward failed fsdp": lambda: gap_after_giving_up(fsdp(), everyone, "forward", exchange=True),
        "early backward given up fsdp": lambda: gap_after_giving_up(fsdp(), (), "backward", exchange=False),
        "resumes": lambda: resumes_exactly(ranks),
        "altered": lambda: complaint(ddp(), alter_on_rank_1),
        "bypassed": lambda: complaint(ddp(), bypass),
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    """Run all checks that need this number of ranks; `RANK.json` has the results of those that are done."""
    torch.set_num_threads(1)
    patience = timedelta(seconds=SECONDS_PER_COLLECTIVE)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=patience
    )
    results, file = {}, folder / f"{rank}.json"
    ranks = Ranks(rank, world_size, CPU)
    more = on_two_ranks if world_size == 2 else on_three_ranks
    for name, check in (on_any_ranks(ranks) | more(ranks)).items():
        file.write_text(json.dumps(results), encoding="utf-8")
        results[name] = check()
    file.write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
