"""How a model is spread over ranks: its copies or shards, their gradients, and the whole state behind the shards."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.profiler import record_function

from ups.errors import Unsynchronised
from ups.models.blocks import Blocks
from ups.training.distributed import Ranks

Sharding = Literal["ddp", "fsdp"]


def parallelize(model: nn.Module, ranks: Ranks, sharding: Sharding) -> None:
    """Spread a model over ranks, in place: every rank holds a replica of rank 0's (`ddp`) or a shard (`fsdp`).

    Gradients are exchanged where `exchanging` says so.
    """
    if ranks.world_size == 1:
        return
    if sharding == "fsdp":
        _shard(model, ranks)
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, src=0)


def _shard(model: nn.Module, ranks: Ranks) -> None:
    """Shard every block by itself, then what is left with the root (FSDP2)."""
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))

    def placement(parameter: nn.Parameter) -> Shard | None:
        even = (axis for axis, size in enumerate(parameter.shape) if size % ranks.world_size == 0)
        return next(map(Shard, even), None)

    blocks = [block for blocks in model.modules() if isinstance(blocks, Blocks) for block in blocks]
    for module in (*blocks, model):
        # The root too: a forward pass that no backward pass follows then leaves nothing unsharded.
        fully_shard(module, mesh=mesh, reshard_after_forward=True, shard_placement_fn=placement)


@contextmanager
def exchanging(model: nn.Module, ranks: Ranks, when: bool, bucket_megabytes: float) -> Iterator[None]:
    """Within it, backward passes add to the gradients; at its end, if `when`, all ranks have their mean.

    Replicas exchange when the last backward pass is over, in buckets of about so many megabytes, whatever gradients
    there are: parameters that a batch does not use have none, and all ranks must have used the same ones.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(when)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield
        if when and ranks.world_size > 1:
            with record_function("exchange"):
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                _average(gradients, ranks.world_size, bucket_megabytes * 2**20)


@torch.no_grad()
def _average(gradients: list[Tensor], world_size: int, bucket_bytes: float) -> None:
    """Replace gradients by their mean over all ranks."""
    buckets: list[list[Tensor]] = []
    size = math.inf
    for gradient in gradients:
        if size + gradient.nbytes > bucket_bytes:
            buckets.append([])
            size = 0.0
        buckets[-1].append(gradient)
        size += gradient.nbytes
    flat = [torch.cat([gradient.flatten() for gradient in bucket]).div_(world_size) for bucket in buckets]
    for sent in [dist.all_reduce(part, async_op=True) for part in flat]:
        sent.wait()
    for bucket, part in zip(buckets, flat, strict=True):
        parts = part.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [values.view_as(g) for values, g in zip(parts, bucket, strict=True)])


def abandon(model: nn.Module) -> None:
    """Give up a step on all ranks: forget gradients, and forward passes without a backward pass.

    Under `fsdp` forward passes are collective, as is this function: all ranks must have stopped at the same place.
    """
    model.zero_grad(set_to_none=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.zero_grad(set_to_none=True)
            module.reshard()


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The part of each tensor that lies on this rank, sharing its memory."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients g by min(1, max_norm / |g|) in place and return |g|, over all of them and all ranks."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    parts = local(gradients)
    norm = torch.stack(torch._foreach_norm(parts)).norm()
    if isinstance(gradients[0], DTensor):
        square = norm.square()
        dist.all_reduce(square, group=gradients[0].device_mesh.get_group())
        norm = square.sqrt()
    torch._foreach_mul_(parts, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@torch.no_grad()
def check_gradients_agree(model: nn.Module, ranks: Ranks, group: dist.ProcessGroup | None = None) -> None:
    """Compare a hash of every gradient over ranks; shards of gradients, which differ by design, are not compared.

    Raises:
        Unsynchronised: on every rank, if two ranks have different gradients.
    """
    names, parameters = zip(*model.named_parameters(), strict=True)
    if ranks.world_size == 1 or isinstance(parameters[0], DTensor):
        return
    hashes = torch.stack([_hash(p.new_empty(0) if p.grad is None else p.grad) for p in parameters])
    gathered = [torch.empty_like(hashes) for _ in range(ranks.world_size)]
    dist.all_gather(gathered, hashes, group=group)
    differing = (torch.stack(gathered) != gathered[0]).nonzero().tolist()
    if differing:
        rank, parameter = differing[0]
        raise Unsynchronised(
            f"ranks 0 and {rank} have different gradients of {names[parameter]}: "
            "backward passes belong within `exchanging`"
        )


def _hash(gradient: Tensor) -> Tensor:
    """Sum of (2 i + 1) bits_i modulo 2^64 over the elements i: exact, whatever the order of summation."""
    bits = gradient.float().flatten().view(torch.int32)
    return (bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum()


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, whole and on the CPU (collective under `fsdp`)."""
    return {name: _whole(value) for name, value in model.state_dict().items()}


def load_full_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Copy what `full_state` returned into a model, plain, replicated or sharded; every rank has the whole state."""
    own = model.state_dict()
    model.load_state_dict({name: _copy(value, own.get(name)) for name, value in state.items()})


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter name, whole and on the CPU, and its groups (collective under `fsdp`)."""
    names, packed = _names(model, optimizer), optimizer.state_dict()
    state = {names[i]: {key: _whole(value) for key, value in values.items()} for i, values in packed["state"].items()}
    groups = [group | {"params": [names[i] for i in group["params"]]} for group in packed["param_groups"]]
    return {"state": state, "param_groups": groups}


def load_full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Continue from what `full_optimizer_state` returned, on any number of ranks and with either sharding."""
    index_of = {name: i for i, name in enumerate(_names(model, optimizer))}
    own = dict(model.named_parameters())
    packed = {
        index_of[name]: {key: _copy(value, own[name]) for key, value in values.items()}
        for name, values in state["state"].items()
    }
    groups = [group | {"params": [index_of[name] for name in group["params"]]} for group in state["param_groups"]]
    optimizer.load_state_dict({"state": packed, "param_groups": groups})


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Parameter names in the order in which the optimizer numbers them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _whole(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().to("cpu", copy=True)


def _copy(value: Any, own: Tensor | None) -> Any:
    """A copy of `value`, sharded as `own` where that is sharded and has the same shape; without communication."""
    if not isinstance(value, Tensor):
        return value
    if not isinstance(own, DTensor) or own.shape != value.shape:
        return value.clone()
    return distribute_tensor(value.to(own.device, copy=True), own.device_mesh, own.placements, src_data_rank=None)
