"""Gradients through encoding, steps and decoding, against finite differences in double precision."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.surrogate.tiny import dataset_of, domain_of, random_inputs, tiny_model, tiny_surrogate
from ups.data.families import PARAMETERS, condition_features
from ups.data.pdebench import FAMILIES
from ups.models import backbone
from ups.models.blocks import constant
from ups.models.codec import Codec
from ups.surrogate.export import PhysicalModel
from ups.surrogate.surrogate import Setting, Surrogate, condition_of, rollout

NU, SMALL_BATCH = "burgers_1d", 2
SOME = ("diffusion_reaction_1d", "compressible_ns_1d", "compressible_ns_2d", "incompressible_ns_2d", "darcy_2d")


def has_true_gradients(model: PhysicalModel, num_steps: int) -> bool:
    """Whether gradients of some steps to all inputs are those of finite differences, along random directions."""
    inputs = [value.requires_grad_() for value in random_inputs(model, SMALL_BATCH).values()]

    def predicted(*values: Tensor) -> Tensor:
        for _ in range(num_steps):
            u = model(*values)
            values = (u, *values[1:])
        return u

    return torch.autograd.gradcheck(predicted, inputs, fast_mode=True, atol=1e-6)


def two_steps(surrogate: Surrogate, u_0: Tensor, nu: Tensor) -> Tensor:
    """Two time steps of Burgers from fields u_0 (B, 1, X), (B, 2, 1, X)."""
    dataset = dataset_of(FAMILIES[NU])
    z_0, features = surrogate.encode(u_0, NU), torch.tensor(condition_features(dataset)).to(u_0)
    condition = condition_of(features, {"nu": nu}, len(u_0))
    step = surrogate.plain_step(Setting(NU, domain_of(dataset), z_0[..., :0], condition))
    return surrogate.decode(rollout(step, z_0, 2), NU)


@pytest.mark.parametrize("family", SOME)
def test_gradients_are_those_of_finite_differences(family: str):
    """Of the initial state, the coefficients and every parameter, through two steps or a steady solution."""
    assert has_true_gradients(tiny_model(family).double(), 1 if FAMILIES[family].steady else 2)


@pytest.mark.parametrize("limit", ["max_growth", "max_rms", "max_mean", "max_fluctuation"])
def test_gradients_are_true_where_a_limit_holds(limit: str):
    """A step that is rescaled or clamped has the gradient of the limited state."""
    model = tiny_model("compressible_ns_2d").double()
    inputs = random_inputs(model, SMALL_BATCH).values()
    free = model(*inputs)
    getattr(model.model.statistics, limit).fill_(0.5)
    assert not torch.allclose(model(*inputs), free, rtol=1e-3)
    assert has_true_gradients(model, 2)


@pytest.mark.parametrize("family", ["compressible_ns_1d", "shallow_water_2d", "darcy_2d"])
def test_constant_fields_have_finite_gradients(family: str):
    """A fluid at rest, where the amplitude of the state is 0."""
    model = tiny_model(family)
    inputs = [value.requires_grad_() for value in model.example(SMALL_BATCH)]
    gradients = torch.autograd.grad(model(*inputs).sum(), inputs)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_gradients_flow_through_a_rollout_in_latents():
    """The viscosity's gradient through latent steps is that of a central difference."""
    surrogate, u_0 = tiny_surrogate(NU), torch.rand(3, 1, 12, dtype=torch.float64, generator=torch.manual_seed(0))
    surrogate.codec.double(), surrogate.operator.double()
    nu = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    two_steps(surrogate, u_0, nu).square().sum().backward()
    h = 1e-6
    right, left = (two_steps(surrogate, u_0, nu.detach() + s).square().sum().item() for s in (h, -h))
    assert nu.grad.item() == pytest.approx((right - left) / (2 * h), rel=1e-6) and nu.grad.abs() > 1e-5


@pytest.mark.parametrize("family", SOME)
def test_a_batch_may_be_mapped_over(family: str):
    """`torch.func.vmap` of the prediction for one sample is the prediction for a batch, and so are its gradients."""
    model = tiny_model(family).double()
    inputs = tuple(random_inputs(model, 3).values())

    def energy(*sample: Tensor) -> tuple[Tensor, Tensor]:
        u = model(*(value[None] for value in sample))[0]
        return u.square().sum(), u

    every_input = tuple(range(len(inputs)))
    gradients, mapped = torch.func.vmap(torch.func.grad(energy, every_input, has_aux=True))(*inputs)
    torch.testing.assert_close(mapped, model(*inputs))
    leaves = [value.requires_grad_() for value in inputs]
    torch.testing.assert_close(gradients, torch.autograd.grad(model(*leaves).square().sum(), leaves))


def test_gradients_can_be_taken_after_inference_mode(monkeypatch: pytest.MonkeyPatch):
    """What is cached by a first prediction in inference mode serves a later one with gradients."""
    monkeypatch.setattr(backbone, "fourier_basis", constant(backbone.fourier_basis.__wrapped__))  # nothing cached yet
    surrogate, u_0, nu = tiny_surrogate(NU), torch.ones(1, 1, 12), torch.tensor(0.1, requires_grad=True)
    with torch.inference_mode():
        expected = two_steps(surrogate, u_0, nu).clone()
    found = two_steps(surrogate, u_0, nu)
    found.sum().backward()
    assert torch.equal(found.detach(), expected) and nu.grad.isfinite()


def test_encoding_has_gradients_to_bases():
    """The bases of a codec that is trained get the gradients of what it encodes."""
    codec: Codec = tiny_surrogate(NU).codec.double().requires_grad_(True)
    u = torch.rand(2, 1, 12, dtype=torch.float64, generator=torch.manual_seed(0))

    def encoded(skew: Tensor) -> Tensor:
        return torch.func.functional_call(_Encoder(codec), {f"codec.skew.{NU}/fields": skew}, (u,))

    assert torch.autograd.gradcheck(encoded, (codec.skew[f"{NU}/fields"],))


class _Encoder(torch.nn.Module):
    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self.codec = codec

    def forward(self, u: Tensor) -> Tensor:
        return self.codec.encode(u, f"{NU}/fields")


@pytest.mark.parametrize("value", [0.01, -0.4, 1.0, 0.0, 1e-14, 3e5])
def test_a_condition_of_tensors_is_that_of_numbers(value: float):
    """Every parameter, given as a tensor, has the features that a dataset with this parameter has."""
    dataset = replace(dataset_of(FAMILIES[NU]), parameters=dict.fromkeys(PARAMETERS, 0.7))
    features = torch.tensor(condition_features(dataset), dtype=torch.float64)
    for name in PARAMETERS:
        expected = condition_features(replace(dataset, parameters=dataset.parameters | {name: value}))
        found = condition_of(features, {name: torch.tensor([0.7, value], dtype=torch.float64)}, 2)
        assert found[0].tolist() == pytest.approx(features.tolist())
        assert found[1].tolist() == pytest.approx(expected)
