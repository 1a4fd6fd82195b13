"""Compiled blocks compute what eager ones do; without a compiler the model stays eager and the reason is told."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.backbones import small
from tests.training.jobs import NO_TERMS, inputs_of, launched, section
from tests.training.toys import ranks
from ups.models.backbone import Block, TokenMixer
from ups.models.sizes import Domain, Sizes
from ups.runs.run import Run
from ups.training import parallel
from ups.training import update as update_module
from ups.training.batches import Batches
from ups.training.injection import Injection
from ups.training.parallel import full_state
from ups.training.stages.operator import build
from ups.training.update import MAX_COMPILED_SHAPES, Update, compile_blocks, why_not_compiled

torch.set_num_threads(1)

WITHOUT_COMPILER = """
import torch
from ups.training.update import why_not_compiled
print(why_not_compiled(torch.device("cpu")))
"""


def token_mixer() -> TokenMixer:
    """A small mixer with random weights."""
    torch.manual_seed(0)
    sizes = Sizes(
        families=("advection_1d", "burgers_1d"),
        num_axes=(2, 2),
        num_fields=(1, 1),
        latent_channels=(2, 2),
        coefficient_channels=(0, 0),
        num_conditions=4,
    )
    mixer = TokenMixer(small(modes=(3, 3, 3)), sizes, num_states=1, num_conditions=4)
    with torch.no_grad():
        for p in mixer.parameters():
            p.copy_(0.3 * torch.randn(p.shape))
    return mixer


def gradients(mixer: nn.Module) -> list[torch.Tensor]:
    """Gradients of a quadratic of the output, for a family on a grid that wraps on one axis."""
    generator = torch.Generator().manual_seed(1)
    mixer.zero_grad()
    inputs = (torch.randn(shape, generator=generator) for shape in ((2, 24, 2), (2, 4), (2, 4)))
    mixer(*inputs, Domain("advection_1d", (4, 6), (True, False)), 2).square().sum().backward()
    return [p.grad.clone() for p in mixer.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.usefixtures("compiler")
def test_compiled_blocks_have_the_same_gradients(mode: str | None):
    """Compiled and eager model agree, and neither the names of the weights nor copies know about it."""
    model = token_mixer()
    names, expected = list(model.state_dict()), gradients(model)
    compile_blocks(model, mode)
    for found, wanted in zip(gradients(model), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-4 * wanted.abs().max().item())
    assert list(model.state_dict()) == names
    assert all(torch.equal(g, e) for g, e in zip(gradients(copy.deepcopy(model)), expected, strict=True))


def test_a_missing_compiler_is_told(tmp_path: Path):
    """Without a C++ compiler there is a reason, in one line."""
    environment = os.environ | {"PATH": str(tmp_path), "CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("InvalidCxxCompiler: ")
    assert len(result.stdout.splitlines()) == 1


class GraphMemory:
    """The memory of CUDA graphs: what blocks and their backward passes return is NaN after the next `mark`."""

    def __init__(self, model: nn.Module) -> None:
        self.results: list[torch.Tensor] = []
        self.num_marks = 0
        for block in (module for module in model.modules() if isinstance(module, Block)):
            block.register_forward_hook(lambda module, inputs, output: self.keep(output))
            for parameter in block.parameters():
                parameter.register_hook(self.keep)

    def keep(self, result: torch.Tensor) -> None:
        """Remember the memory of a result, not the tensor: autograd still takes a gradient over without a copy."""
        self.results.append(result.detach())

    def mark(self) -> None:
        """Begin a step: torch may now overwrite what graphs have returned."""
        self.num_marks += 1
        for result in self.results:
            result.fill_(torch.nan)
        self.results.clear()

    def holds(self, tensor: torch.Tensor | None) -> bool:
        """Whether a tensor lies in this memory."""
        addresses = {result.untyped_storage().data_ptr() for result in self.results}
        return tensor is not None and tensor.untyped_storage().data_ptr() in addresses


def losses_terms_and_weights(root: Path, mode: str | bool, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Those of an operator trained for some steps of several micro-batches, read after its memory was overwritten."""
    terms = NO_TERMS | {"spectral": {"weight": 0.1, "phase": [0.0, 1.0]}}
    unroll = {"horizon": 2, "pushforward": False, "start": 0.0, "families": None}
    config, launch = section(steps=6, unroll=unroll, terms=terms), launched(micro_batch_tokens=32, compile=mode)
    run, inject = Run(root, "operator", "", {}, inputs_of(root), launch, "cpu", root), Injection(root, 0)
    torch.manual_seed(0)
    stage = build(config, run)
    update, batches = Update(stage, config, run, ranks(), inject), Batches(stage, config, run, ranks(), inject)
    memory, read, clip = GraphMemory(update.model), [], parallel.clip_gradients

    def clipped(parameters: tuple[nn.Parameter, ...], max_norm: float) -> torch.Tensor:
        assert any(memory.holds(p.grad) for p in parameters), "autograd has copied the gradients"
        return clip(parameters, max_norm)

    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "cudagraph_mark_step_begin", memory.mark)
        patch.setattr(parallel, "clip_gradients", clipped)
        for share in map(batches.read, range(config.steps)):
            assert len(share.micro_batches) > 1
            read += [update(share, 0.003, stop=False, save=False).loss, *stage.terms.values()]
    assert memory.num_marks == (config.steps if mode else 0)
    memory.mark()
    return [*read, *full_state(update.model).values(), *full_state(update.average).values()]


def test_nothing_is_read_that_cuda_graphs_have_overwritten(root: Path, monkeypatch: pytest.MonkeyPatch):
    """Losses, terms and weights are the same where graphs overwrite in a step what they have returned in the last."""
    monkeypatch.setattr(update_module, "_compile", lambda *_: None)
    plain, found = (losses_terms_and_weights(root, mode, monkeypatch) for mode in (False, "reduce-overhead"))
    assert all(value.isfinite().all() for value in plain)
    assert all(map(torch.equal, found, plain)) and len(found) == len(plain)


def test_every_compiled_model_may_have_its_graphs():
    """Paces of many variants are measured in one process, whose models share the code of a block."""
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        for _ in range(9):
            compile_blocks(token_mixer())
        assert torch._dynamo.config.recompile_limit >= 9 * MAX_COMPILED_SHAPES
        assert torch._dynamo.config.accumulated_recompile_limit >= 9 * MAX_COMPILED_SHAPES


def test_the_compiler_is_tried_once_in_a_process():
    """As often as there are models, each try would be a graph of the same function, of which torch allows few."""
    first = why_not_compiled(torch.device("cpu"))
    with torch._dynamo.config.patch(recompile_limit=1):
        assert [why_not_compiled(torch.device("cpu")) for _ in range(3)] == [first] * 3
