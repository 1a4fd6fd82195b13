"""Optimizers with one face, `step(learning_rate, skip)`, and the schedules of the learning rate."""

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

SMALLEST_SHARE = 0.01
STEP_AT, STEP_FACTOR = (0.6, 0.85), 0.1
PLATEAU_FACTOR = 0.5


class OptimizerConfig(Protocol):
    """What a stage's section says about its optimizer."""

    @property
    def optimizer(self) -> Literal["adamw", "muon"]: ...
    @property
    def weight_decay(self) -> float: ...


class ScheduleConfig(Protocol):
    """What a stage's section says about its learning rate, the peak after the warm-up."""

    @property
    def schedule(self) -> Literal["cosine", "step", "plateau", "constant"]: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def steps(self) -> int: ...


class Optimizer:
    """Several optimizers, `parts` by name, that act as one: same learning rate, and steps that can be skipped.

    `skip` is 1 where a step must change nothing and 0 otherwise, a float tensor () on the parameters' device that the
    host never reads.
    """

    def __init__(self, adamw: torch.optim.AdamW, muon: torch.optim.Muon | None) -> None:
        self.adamw, self.muon = adamw, muon
        self.parts = {"adamw": adamw} if muon is None else {"adamw": adamw, "muon": muon}

    @torch.no_grad()
    def step(self, learning_rate: float, skip: Tensor) -> None:
        """One step with the gradients that the parameters hold."""
        for part in self.parts.values():
            for group in part.param_groups:
                group["lr"] = learning_rate
        self.adamw.found_inf = skip
        self.adamw.step()
        if self.muon is not None:
            _step_unless(self.muon, skip)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """AdamW for all parameters, or Muon for the matrices inside the blocks and AdamW for the rest.

    Muon (Jordan et al. 2024; learning rate scaled as in Liu et al. 2025, arXiv:2502.16982, so that AdamW's fits both)
    is for matrices that map hidden channels to hidden channels: stems, heads and embeddings are left to AdamW, and so
    is the stack of Fourier matrices, which is no matrix. Vectors have no weight decay.
    """
    hidden = _hidden_matrices(model) if config.optimizer == "muon" else []
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in hidden)]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    if not hidden:
        return Optimizer(adamw, None)
    return Optimizer(adamw, torch.optim.Muon(hidden, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"))


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    inside = (module for name, module in model.named_modules() if "blocks" in name.split("."))
    return [module.weight for module in inside if isinstance(module, nn.Linear)]


def _step_unless(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """A step of an optimizer that knows no `found_inf`: where skip is 1, parameters and state are put back after it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for p in parameters:
        optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
    changed = [*parameters, *(optimizer.state[p]["momentum_buffer"] for p in parameters)]
    before = [tensor.clone() for tensor in changed]
    optimizer.step()
    for tensor, old in zip(changed, before, strict=True):
        tensor.copy_(torch.where(skip.bool(), old, tensor))


def learning_rate(config: ScheduleConfig, step: int, validations: Sequence[float] = (), patience: int = 1) -> float:
    """The learning rate of `step`: a linear warm-up to the peak, then the schedule.

    `validations` are all validation losses up to this step.

    - `cosine`: to one hundredth of the peak at the last step;
    - `step`: a tenth of the peak from 60 % of the steps after the warm-up, a hundredth from 85 %;
    - `plateau`: half after every `patience` validations in a row without a new best;
    - `constant`: the peak.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    share = {
        "cosine": SMALLEST_SHARE + (1 - SMALLEST_SHARE) * 0.5 * (1 + math.cos(math.pi * progress)),
        "step": STEP_FACTOR ** sum(progress >= at for at in STEP_AT),
        "plateau": PLATEAU_FACTOR ** num_plateaus(validations, patience),
        "constant": 1.0,
    }[config.schedule]
    return config.learning_rate * share


def num_plateaus(validations: Sequence[float], patience: int) -> int:
    """How often `patience` validations in a row brought no new best; the count starts again after each time."""
    best, waited, found = math.inf, 0, 0
    for loss in validations:
        waited = 0 if loss < best else waited + 1
        best = min(best, loss)
        if waited == patience:
            waited, found = 0, found + 1
    return found
