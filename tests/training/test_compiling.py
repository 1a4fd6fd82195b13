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
from ups.models.backbone import TokenMixer
from ups.models.sizes import Domain, Sizes
from ups.training.update import compile_blocks, why_not_compiled

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
def test_compiled_blocks_have_the_same_gradients(mode: str | None):
    """Compiled and eager model agree, and neither the names of the weights nor copies know about it."""
    model = token_mixer()
    names, expected = list(model.state_dict()), gradients(model)
    if (reason := why_not_compiled(torch.device("cpu"))) is not None:
        pytest.skip(reason)
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
