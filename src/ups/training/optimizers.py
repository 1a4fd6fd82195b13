"""Optimizers (AdamW, Muon) whose steps can be skipped without waiting for the device; learning rate schedules."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups.config.training import TrainingSection


class Optimizer:
    """AdamW, or AdamW and Muon for disjoint sets of parameters, with the same learning rate; `parts` has them by name.

    `skip` is a float tensor () on the parameters' device, 1 if the step must change neither parameters nor moments and
    0 otherwise. The host never reads it, so that no step waits for the device.
    """

    def __init__(self, adamw: torch.optim.AdamW, muon: torch.optim.Muon | None) -> None:
        self.adamw, self.muon = adamw, muon
        self.parts = {"adamw": adamw} if muon is None else {"adamw": adamw, "muon": muon}

    @torch.no_grad()
    def step(self, learning_rate: float, skip: Tensor) -> None:
        """Update all parameters that have a gradient; the others, with their moments, stay as they are."""
        for group in (group for part in self.parts.values() for group in part.param_groups):
            group["lr"] = learning_rate
        self.adamw.found_inf = skip  # how torch.amp.GradScaler has fused optimizers skip a step
        self.adamw.step()
        if self.muon is not None:
            _step_unless(self.muon, skip)

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for part in self.parts.values():
            part.zero_grad()


def make_optimizer(model: nn.Module, config: TrainingSection) -> Optimizer:
    """AdamW for all parameters, or Muon for the matrices inside the blocks and AdamW for the rest.

    Muon (Jordan et al. 2024) orthogonalizes the update of a matrix. Its updates are scaled to the RMS of AdamW's (Liu
    et al. 2025, arXiv:2502.16982), so that both have the same learning rate. It is made for matrices that map hidden
    channels to hidden channels: stems, heads and embeddings are left to AdamW, as are the Fourier weights, which are
    stacks of matrices. Parameters with one axis (biases, gains) have no weight decay.
    """
    inside = (module for name, module in model.named_modules() if "blocks" in name.split("."))
    hidden = [module.weight for module in inside if isinstance(module, nn.Linear) and config.optimizer == "muon"]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in hidden)]
    matrices, vectors = [p for p in rest if p.ndim >= 2], [p for p in rest if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    options = {"weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    return Optimizer(adamw, torch.optim.Muon(hidden, **options) if hidden else None)


def _step_unless(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """A step of an optimizer without `found_inf`: if `skip` is 1, parameters and momentum are restored after it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for p in parameters:
        optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
    changed = [*parameters, *(optimizer.state[p]["momentum_buffer"] for p in parameters)]
    before = [tensor.clone() for tensor in changed]
    optimizer.step()
    for tensor, old in zip(changed, before, strict=True):
        tensor.copy_(torch.where(skip.bool(), old, tensor))


def learning_rate(config: TrainingSection, step: int, valid_losses: Sequence[float] = (), patience: int = 1) -> float:
    """The learning rate of `step`: a linear warm-up to the peak `config.learning_rate`, then `config.schedule`.

    - `cosine`: falls to one hundredth of the peak at the last step;
    - `step`: a tenth of the peak from 60 % of the steps after the warm-up, a hundredth from 85 %;
    - `plateau`: halved after every `patience` validations in a row without a new best, given all `valid_losses` so far;
    - `constant`: the peak.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    factor = {
        "cosine": 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)),
        "step": 0.1 ** ((progress >= 0.6) + (progress >= 0.85)),
        "plateau": 0.5 ** num_plateaus(valid_losses, patience),
        "constant": 1.0,
    }[config.schedule]
    return config.learning_rate * factor


def num_plateaus(valid_losses: Sequence[float], patience: int) -> int:
    """Number of disjoint runs of `patience` validations in a row without a new best loss."""
    best, since_best, plateaus = math.inf, 0, 0
    for loss in valid_losses:
        since_best = 0 if loss < best else since_best + 1
        best = min(best, loss)
        if since_best == patience:
            since_best, plateaus = 0, plateaus + 1
    return plateaus
