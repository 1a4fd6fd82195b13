"""A model on several ranks, replicated (`ddp`) or sharded (`fsdp`): gradients, and states independent of the ranks.

Gradients of replicas are averaged by hand after the backward pass, not by torch's DistributedDataParallel: parameters
of families that a batch does not use have no gradient, and all ranks can skip a step together if one of them runs out
of memory before the exchange.

States are gathered by hand as well, not by torch.distributed.checkpoint: `get_model_state_dict` on the CPU returns the
weights themselves, which change while a checkpoint is written, and `set_optimizer_state_dict` refuses a parameter
without moments, or (`strict=False`) gives it a step count of 1: the step of its first gradient would be another.

Sharding alone imports `torch.distributed.fsdp` and `torch.distributed.tensor`, which takes 0.7 s in every process.
"""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import record_function

from ups.errors import Unsynchronised
from ups.models.blocks import Blocks
from ups.training.distributed import Ranks

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Shard

Sharding = Literal["ddp", "fsdp", "fsdp-offload"]


def parallelize(model: nn.Module, ranks: Ranks, sharding: Sharding) -> None:
    """Replicate rank 0's model on every rank (`ddp`), or shard it over the ranks, in place.

    Shards of `fsdp-offload` are on the CPU, and their optimizer takes its steps there.

    Forward passes need no change; backward passes belong within `gradient_sync`.
    """
    if ranks.world_size > 1 and sharding != "ddp":
        _shard(model, ranks, offload=sharding == "fsdp-offload")
    elif ranks.world_size > 1:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor, src=0)


def _shard(model: nn.Module, ranks: Ranks, *, offload: bool) -> None:
    """Shard every block as a unit of its own, and all other parameters with the root (FSDP2)."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    policy = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if offload else OffloadPolicy()

    def placement(parameter: nn.Parameter) -> "Shard | None":
        # The first axis that divides evenly; None is FSDP2's default: the first axis, padded.
        even = (axis for axis, size in enumerate(parameter.shape) if size % ranks.world_size == 0)
        return next(map(Shard, even), None)

    blocks = [block for blocks in model.modules() if isinstance(blocks, Blocks) for block in blocks]
    for module in (*blocks, model):
        # Reshard the root too: otherwise it stays unsharded after a forward pass without a backward pass.
        fully_shard(module, mesh=mesh, reshard_after_forward=True, shard_placement_fn=placement, offload_policy=policy)


@contextmanager
def gradient_sync(
    model: nn.Module, ranks: Ranks, is_last: bool, bucket_megabytes: float, exchange: torch.dtype
) -> Iterator[None]:
    """A context for backward passes, which add to the gradients; at its end, if `is_last`, the ranks average them.

    `is_last` marks the last micro-batch of a step. Gradients of replicas are sent as `exchange`, in buckets of about
    `bucket_megabytes`. Parameters without gradient are left out, so that all ranks must use the same parameters.
    """
    if _is_fsdp(model):
        model.set_requires_gradient_sync(is_last)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield
        if is_last and ranks.world_size > 1:
            with record_function("exchange"):
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                _average(gradients, ranks.world_size, bucket_megabytes * 2**20, exchange)


@torch.no_grad()
def _average(gradients: list[Tensor], world_size: int, bucket_bytes: float, exchange: torch.dtype) -> None:
    """Replace gradients by their mean over all ranks, rounded to `exchange`; one collective call per bucket."""
    buckets: list[list[Tensor]] = []
    size = math.inf
    for gradient in gradients:
        if size + gradient.nbytes > bucket_bytes:
            buckets.append([])
            size = 0.0
        buckets[-1].append(gradient)
        size += gradient.nbytes
    flat = [torch.cat([gradient.flatten() for gradient in bucket]).div_(world_size).to(exchange) for bucket in buckets]
    for sent in [dist.all_reduce(part, async_op=True) for part in flat]:
        sent.wait()
    for bucket, part in zip(buckets, flat, strict=True):
        parts = part.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [values.view_as(g) for values, g in zip(parts, bucket, strict=True)])


def discard_step(model: nn.Module) -> None:
    """Drop the gradients of an unfinished step, on all ranks, and the state of forward passes without a backward pass.

    Under `fsdp` this function is collective, as forward passes are: all ranks must have stopped after the same one.
    """
    model.zero_grad(set_to_none=True)
    for module in model.modules():
        if _is_fsdp(module):
            module.unshard()
            module.zero_grad(set_to_none=True)
            module.reshard()


def local_shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's shard of each tensor, as a view; tensors that are not sharded are returned as they are."""
    return [tensor.to_local() if _is_sharded(tensor) else tensor for tensor in tensors]


def gathered(shard: Tensor, like: Tensor) -> Tensor:
    """The whole tensor of which every rank has the shard that it has of `like` (collective); replicas have all."""
    if not _is_sharded(like):
        return shard
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    ).full_tensor()


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a tensor that is sharded like `like`."""
    return _sharded_like(whole, like).to_local().to(like.device) if _is_sharded(like) else whole


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients g by min(1, max_norm / |g|) in place; returns |g|, their norm over all ranks."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    parts = local_shards(gradients)
    norm = torch.stack(torch._foreach_norm(parts)).norm()
    if _is_sharded(gradients[0]):
        square = norm.square()
        dist.all_reduce(square, group=gradients[0].device_mesh.get_group())
        norm = square.sqrt()
    torch._foreach_mul_(parts, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@torch.no_grad()
def check_gradients_agree(model: nn.Module, ranks: Ranks) -> None:
    """Raise `Unsynchronised` on every rank if replicas have different hashes of a gradient; no-op if sharded."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    if ranks.world_size == 1 or _is_sharded(parameters[0]):
        return
    hashes = torch.stack([_hash(p.new_empty(0) if p.grad is None else p.grad) for p in parameters])
    gathered = [torch.empty_like(hashes) for _ in range(ranks.world_size)]
    dist.all_gather(gathered, hashes)
    differing = (torch.stack(gathered) != gathered[0]).nonzero().tolist()
    if differing:
        rank, parameter = differing[0]
        raise Unsynchronised(
            f"ranks 0 and {rank} have different gradients of {names[parameter]}: "
            "backward passes belong within `gradient_sync`"
        )


def _hash(gradient: Tensor) -> Tensor:
    """Sum of (2 i + 1) bits_i modulo 2^64 over the elements i: exact in any order of summation."""
    bits = gradient.float().flatten().view(torch.int32)
    return (bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum()


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, unsharded and on the CPU (collective under `fsdp`)."""
    return {name: _unsharded(value) for name, value in model.state_dict().items()}


def load_full_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load what `full_state` returned into a replicated or sharded model; every rank passes the full state."""
    own = model.state_dict()
    model.load_state_dict({name: _sharded_like(value, own.get(name)) for name, value in state.items()})


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter name, unsharded and on the CPU, and its groups (collective under `fsdp`)."""
    names, packed = _names(model, optimizer), optimizer.state_dict()
    state = {names[i]: {key: _unsharded(v) for key, v in values.items()} for i, values in packed["state"].items()}
    groups = [group | {"params": [names[i] for i in group["params"]]} for group in packed["param_groups"]]
    return {"state": state, "param_groups": groups}


def load_full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `full_optimizer_state` returned, for any number of ranks and either sharding."""
    index_of = {name: i for i, name in enumerate(_names(model, optimizer))}
    packed = {
        index_of[name]: {key: _sharded_like(value, model.get_parameter(name)) for key, value in values.items()}
        for name, values in state["state"].items()
    }
    groups = [group | {"params": [index_of[name] for name in group["params"]]} for group in state["param_groups"]]
    optimizer.load_state_dict({"state": packed, "param_groups": groups})


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Parameter names in the order in which the optimizer numbers them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _unsharded(value: Tensor) -> Tensor:
    """A copy of a tensor, unsharded and on the CPU."""
    return (value.full_tensor() if _is_sharded(value) else value).detach().to("cpu", copy=True)


def _sharded_like(value: Tensor, own: Tensor | None) -> Tensor:
    """A copy of a tensor, sharded like `own` if that is sharded and has the same shape."""
    if not _is_sharded(own) or own.shape != value.shape:
        return value.clone()
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(own.device, copy=True), own.device_mesh, own.placements, src_data_rank=None)


def _is_fsdp(module: nn.Module) -> "TypeGuard[FSDPModule]":
    imported = sys.modules.get("torch.distributed.fsdp")
    return imported is not None and isinstance(module, imported.FSDPModule)


def _is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    imported = sys.modules.get("torch.distributed.tensor")
    return imported is not None and isinstance(tensor, imported.DTensor)
