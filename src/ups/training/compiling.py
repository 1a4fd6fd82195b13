"""Compile the blocks of a token mixer, or say why it is not possible here."""

import time

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from ups.models.mixing import Block

MAX_SHAPES = 64


def compile_blocks(model: nn.Module) -> str | None:
    """Compile every block of `model` in place, or leave the model as it is and return the reason in one line.

    Block by block: all blocks share one graph per batch shape and set of boundaries, whatever the family, so that few
    graphs are compiled, when their shape first comes. Names in `state_dict` and copies of the model are unaffected.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if not blocks:
        return "the model has no blocks to compile"
    reason = _why_not(next(model.parameters()).device)
    if reason is None:
        torch._dynamo.config.recompile_limit = MAX_SHAPES
        for block in blocks:
            block.compile(fullgraph=True, dynamic=False)
    return reason


def _why_not(device: torch.device) -> str | None:
    """Compile a function that no cache can know: a cached one would hide that the compiler is gone."""
    now = time.time_ns()
    probe = torch.compile(lambda x: x + now, fullgraph=True, dynamic=False)
    try:
        probe(torch.zeros(64, device=device))
    except BackendCompilerFailed as error:
        return f"{type(error.inner_exception).__name__}: {error.inner_exception}".splitlines()[0]
    return None
