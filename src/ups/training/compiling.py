"""Compile the blocks of a model, or say why that is not possible here."""

import time

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from ups.models.blocks import Blocks

MAX_SHAPES = 64


def compile_blocks(model: nn.Module) -> None:
    """Compile every block of `model` in place.

    Block by block: all blocks share one graph per batch shape and set of boundaries, whatever the family, so that few
    graphs are compiled, when their shape first comes. Names in `state_dict` and copies of the model are unaffected.
    """
    torch._dynamo.config.recompile_limit = MAX_SHAPES
    for blocks in (module for module in model.modules() if isinstance(module, Blocks)):
        for block in blocks:
            block.compile(fullgraph=True, dynamic=False)


def why_not_compiled(device: torch.device) -> str | None:
    """One line if `torch.compile` does not work on this machine; no C++ compiler, say."""
    now = time.time_ns()  # a function that no cache can know: a cached one would hide that the compiler is gone
    probe = torch.compile(lambda x: x + now, fullgraph=True, dynamic=False)
    try:
        probe(torch.zeros(64, device=device))
    except BackendCompilerFailed as error:
        return f"{type(error.inner_exception).__name__}: {error.inner_exception}".splitlines()[0]
    return None
