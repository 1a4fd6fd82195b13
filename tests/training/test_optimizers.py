"""Optimizers and schedules: values by hand, skipped steps, saved and restored states."""

import io

import pytest
import torch
from torch import nn

from tests.backbones import small
from tests.training.jobs import section
from ups.config.training import TrainingSection
from ups.models.backbone import TokenMixer
from ups.models.sizes import Sizes
from ups.training.optimizers import Optimizer, learning_rate, make_optimizer, num_plateaus, orthogonalized

torch.set_num_threads(1)

GO, SKIP = torch.tensor(0.0), torch.tensor(1.0)
KINDS = ("adamw", "muon")


def configured(optimizer: str = "adamw", schedule: str = "cosine", weight_decay: float = 0.1) -> TrainingSection:
    """A stage's section with this optimizer and schedule."""
    changes = {"optimizer": optimizer, "schedule": schedule, "weight_decay": weight_decay, "patience": 2}
    return section(**changes, learning_rate=0.01, warmup_steps=10, steps=110)


def token_mixer() -> TokenMixer:
    """A small mixer, the same every time."""
    torch.manual_seed(0)
    sizes = Sizes(
        families=("advection_1d", "burgers_1d"),
        num_axes=(2, 2),
        num_fields=(1, 1),
        latent_channels=(2, 2),
        coefficient_channels=(0, 0),
        num_conditions=4,
    )
    return TokenMixer(small(modes=(3, 3, 3)), sizes, num_states=1, num_conditions=4)


def set_gradients(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    """Random gradients for all parameters."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = scale * torch.randn(p.shape, generator=generator)


def steps(model: nn.Module, optimizer: Optimizer, seeds: range) -> None:
    """A step for every seed."""
    for seed in seeds:
        set_gradients(model, seed)
        optimizer.step(0.01, GO)


def content(model: nn.Module, optimizer: Optimizer) -> bytes:
    """Every bit of the weights and of the optimizer's tensors."""
    states = [state for part in optimizer.parts.values() for state in part.state_dict()["state"].values()]
    tensors = [*model.parameters(), *(tensor for state in states for tensor in state.values())]
    return b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)


def test_first_step_of_adamw_by_hand():
    """The first step is the learning rate towards minus the gradient's sign; only matrices decay."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(2.0)
    model.weight.grad, model.bias.grad = torch.full((2, 2), 3.0), torch.full((2,), -3.0)
    make_optimizer(model, configured()).step(0.01, GO)
    assert torch.allclose(model.weight, torch.full((2, 2), 2.0 * (1 - 0.01 * 0.1) - 0.01))
    assert torch.allclose(model.bias, torch.full((2,), 2.0 + 0.01))


def test_muon_takes_the_matrices_of_the_blocks():
    """Stem, summary, head, condition and vectors are left to AdamW; nothing is left out."""
    model = token_mixer()
    optimizer = make_optimizer(model, configured("muon"))
    names = {p: name for name, p in model.named_parameters()}
    muon = {names[p] for p in optimizer.parts["muon"].param_groups[0]["params"]}
    adamw = [names[p] for group in optimizer.parts["adamw"].param_groups for p in group["params"]]
    inside = ("mlp.first.weight", "mlp.second.weight", "modulation.weight", "mixing.weights.0", "mixing.weights.1")
    assert muon == {
        f"trunks.{family}.blocks.{block}.{name}" for family in (0, 1) for block in (0, 1) for name in inside
    }
    assert sorted([*adamw, *muon]) == sorted(names.values())


def test_orthogonalized_against_singular_value_decomposition():
    """Tall and wide matrices and stacks become U V^T of U S V^T within a third, times 0.2 sqrt(longest edge)."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(size, generator=generator) for size in ((6, 24), (24, 6), (3, 2, 9, 6), (24, 6))]
    for matrix, found in zip(given, orthogonalized(given), strict=True):
        stack = matrix.flatten(1, -2) if matrix.ndim > 2 else matrix.unsqueeze(0)
        u, _, v = torch.linalg.svd(stack, full_matrices=False)
        inner = u.mT @ found.reshape(stack.shape) @ v.mT / (0.2 * max(stack.shape[1:]) ** 0.5)
        assert (inner - torch.eye(6)).abs().max() < 0.33


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-30, 1e-20])
def test_a_gradient_that_fades_does_not_grow(size: float):
    """Behind dead units it decays to where its squares underflow: the update decays too, and is finite."""
    matrix = size * torch.randn(6, 24, generator=torch.Generator().manual_seed(0))
    (found,) = orthogonalized([matrix])
    assert found.abs().max() <= 1e10 * size


def test_muon_takes_the_queries_and_keys_of_a_transformer():
    """Of torch's attention the joint matrix of queries, keys and values too, which is no module of its own."""
    attention = nn.ModuleDict({"blocks": nn.TransformerEncoderLayer(8, 2, 16)})
    muon = make_optimizer(attention, configured("muon")).parts["muon"].param_groups[0]["params"]
    shapes = sorted(tuple(p.shape) for p in muon)
    assert shapes == [(8, 8), (8, 16), (16, 8), (24, 8)]


def test_a_kernel_moves_as_the_matrix_of_all_its_inputs():
    """A convolution (out, in, points) takes the step of a linear map (out, in * points), unless it is the first."""
    linear, kernel = nn.ModuleDict({"blocks": nn.Linear(6, 4)}), nn.ModuleDict({"up": nn.Conv1d(2, 4, 3)})
    kernel["lift"] = nn.Conv1d(1, 2, 3)
    gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        kernel["up"].weight.copy_(linear["blocks"].weight.view(4, 2, 3))
    linear["blocks"].weight.grad, kernel["up"].weight.grad = gradient, gradient.view(4, 2, 3)
    for model in (linear, kernel):
        make_optimizer(model, configured("muon")).step(0.01, GO)
    assert torch.equal(kernel["up"].weight.flatten(1), linear["blocks"].weight)
    groups = make_optimizer(kernel, configured("muon")).parts["adamw"].param_groups
    assert any(p is kernel["lift"].weight for group in groups for p in group["params"])


def test_first_step_of_muon_by_hand():
    """A diagonal gradient moves each diagonal entry by about 0.2 sqrt(2) learning rates, whatever its size."""
    model = nn.ModuleDict({"blocks": nn.Linear(2, 2)})
    with torch.no_grad():
        model["blocks"].weight.zero_()
    model["blocks"].weight.grad, model["blocks"].bias.grad = torch.diag(torch.tensor([5.0, -2.0])), torch.zeros(2)
    make_optimizer(model, configured("muon")).step(0.01, GO)
    step = 0.01 * 0.2 * 2**0.5
    assert torch.allclose(model["blocks"].weight, torch.diag(torch.tensor([-step, step])), atol=0.33 * step)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_skipped_step_changes_no_bit(kind: str, scale: float, steps_before: int):
    """Whatever the gradients hold, parameters, moments and counters stay as they were, and training goes on alike."""
    model, undisturbed = token_mixer(), token_mixer()
    optimizer, other = make_optimizer(model, configured(kind)), make_optimizer(undisturbed, configured(kind))
    steps(model, optimizer, range(steps_before))
    steps(undisturbed, other, range(steps_before))
    set_gradients(model, 99, scale)
    optimizer.step(0.01, SKIP)
    if steps_before:
        assert content(model, optimizer) == content(undisturbed, other)
    steps(model, optimizer, range(5, 7))
    steps(undisturbed, other, range(5, 7))
    assert content(model, optimizer) == content(undisturbed, other)


@pytest.mark.parametrize("kind", KINDS)
def test_state_comes_back_from_a_file(kind: str):
    """Two steps, a file, two more steps are four steps, bit by bit; the file holds tensors and plain values only."""
    model = token_mixer()
    optimizer, file = make_optimizer(model, configured(kind)), io.BytesIO()
    steps(model, optimizer, range(2))
    torch.save([model.state_dict(), {name: part.state_dict() for name, part in optimizer.parts.items()}], file)
    steps(model, optimizer, range(2, 4))
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    again = token_mixer()
    restored = make_optimizer(again, configured(kind))
    again.load_state_dict(weights)
    for name, part in restored.parts.items():
        part.load_state_dict(state[name])
    steps(again, restored, range(2, 4))
    assert content(again, restored) == content(model, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_lowers_a_quadratic(kind: str):
    """A matrix in a block moves to the one that is wanted."""
    model = nn.ModuleDict({"blocks": nn.Linear(6, 6)})
    wanted = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    optimizer = make_optimizer(model, configured(kind, weight_decay=0.0))

    def error() -> torch.Tensor:
        return (model["blocks"].weight - wanted).square().sum()

    first = error().item()
    for _ in range(300):
        optimizer.zero_grad()
        error().backward()
        optimizer.step(0.02, GO)
    assert error().item() < 0.1 * first


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 109: 1.0}),
        ("cosine", {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.505, 110: 0.01}),
        ("step", {0: 0.1, 69: 1.0, 70: 0.1, 94: 0.1, 95: 0.01, 109: 0.01}),
        ("plateau", {0: 0.1, 10: 0.5, 109: 0.5}),
    ],
)
def test_learning_rate_by_hand(schedule: str, expected: dict[int, float]):
    """Warm-up over 10 steps, then the schedule over 100; on a plateau two validations without a better one halve it."""
    config = configured(schedule=schedule)
    found = {step: learning_rate(config, step, [1.0, 2.0, 1.0], patience=2) for step in expected}
    assert found == pytest.approx({step: 0.01 * share for step, share in expected.items()})


@pytest.mark.parametrize(
    ("validations", "expected"),
    [
        ([], 0),
        ([3.0, 2.0, 1.0], 0),
        ([1.0, 1.0], 0),
        ([1.0, 1.0, 1.0], 1),
        ([1.0, 2.0, 0.5, 2.0, 0.5], 1),
        ([1.0, 2.0, 2.0, 2.0, 2.0], 2),
        ([float("nan"), float("nan"), 1.0], 1),
    ],
)
def test_plateaus_by_hand(validations: list[float], expected: int):
    """Each run of two validations that bring no new best counts once; a loss that is no number is never better."""
    assert num_plateaus(validations, patience=2) == expected
