"""Compiled blocks compute what eager ones do; without a compiler the model stays eager and the reason is told."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ups.models.domain import Domain
from ups.models.mixing import TokenMixer
from ups.training.compiling import compile_blocks

torch.set_num_threads(1)

WITHOUT_COMPILER = """
from test_compiling import gradients, token_mixer
from ups.training.compiling import compile_blocks
model = token_mixer()
before = gradients(model)
print(compile_blocks(model))
assert all((old == new).all() for old, new in zip(before, gradients(model), strict=True))
"""


def token_mixer() -> TokenMixer:
    """A small mixer with random weights."""
    torch.manual_seed(0)
    sizes = {"num_families": 2, "in_channels": 3, "out_channels": 2, "summary_channels": 2, "num_conditions": 4}
    mixer = TokenMixer(**sizes, hidden_channels=8, num_layers=2, modes=3)
    with torch.no_grad():
        for p in mixer.parameters():
            p.copy_(0.3 * torch.randn(p.shape))
    return mixer


def gradients(mixer: nn.Module) -> list[torch.Tensor]:
    """Gradients of a quadratic of the output, for a family on a grid that wraps on one axis."""
    generator = torch.Generator().manual_seed(1)
    mixer.zero_grad()
    inputs = (torch.randn(shape, generator=generator) for shape in ((2, 24, 3), (2, 2), (2, 4)))
    mixer(*inputs, Domain(0, (4, 6), (True, False)), 2).square().sum().backward()
    return [p.grad.clone() for p in mixer.parameters()]


@pytest.mark.skipif(compile_blocks(token_mixer()) is not None, reason="no C++ compiler here")
def test_compiled_blocks_have_the_same_gradients():
    """Compiled and eager model agree, and neither the names of the weights nor copies know about it."""
    model = token_mixer()
    names, expected = list(model.state_dict()), gradients(model)
    assert compile_blocks(model) is None
    for found, wanted in zip(gradients(model), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-4 * wanted.abs().max().item())
    assert list(model.state_dict()) == names
    assert all(torch.equal(g, e) for g, e in zip(gradients(copy.deepcopy(model)), expected, strict=True))


@pytest.mark.parametrize("compiler", ["no-such-compiler", "/bin/false"])
def test_without_compiler_the_model_stays_eager(tmp_path: Path, compiler: str):
    """The reason is one line, and the model computes as before."""
    environment = os.environ | {"PATH": str(tmp_path), "CXX": compiler, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("InvalidCxxCompiler: ")
    assert len(result.stdout.splitlines()) == 1


def test_a_model_without_blocks_is_left_alone():
    """What has no blocks says so."""
    assert compile_blocks(nn.Linear(2, 2)) == "the model has no blocks to compile"
