"""Optimizers (AdamW, Muon) whose steps can be skipped without waiting for the device; learning rate schedules."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups.config.training import Training
from ups.errors import ConfigFault
from ups.training import parallel

MOMENTUM = 0.9
NEWTON_SCHULZ, ITERATIONS = (3.4445, -4.7750, 2.0315), 3
SMALLEST_NORM = 1e-7  # of a gradient that is scaled to full size; that of dead units falls to where squares underflow
# Names of the parts of a model whose maps lead from hidden channels to hidden channels: its blocks, those of the FNO,
# and the levels of the U-Net.
HIDDEN = {"blocks", "fno_blocks", "encode", "down", "middle", "up", "decode"}
KERNELS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Muon(torch.optim.Optimizer):
    """p <- (1 - r d) p - 0.2 r sqrt(longest edge) O(n) for matrices p, learning rate r and weight decay d.

    n = g + 0.9 (m - g) of the gradient g and its running mean m (Nesterov), and O makes all singular values about 1
    (Jordan et al. 2024), so that no direction of a matrix learns faster than another. The factor gives updates the RMS
    of AdamW's (Liu et al. 2025, arXiv:2502.16982): both take the same learning rate. A parameter with more than two
    axes is a stack: (M, 2, C, C) are M matrices (2 C, C), real above imaginary part of a Fourier mode; the `kernels` of
    convolutions are matrices (out, in * points).

    `found_inf` is the `skip` of `Optimizer.step`. A matrix that is sharded over ranks is gathered on each of them.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], weight_decay: float, kernels: Sequence[nn.Parameter] = ()
    ) -> None:
        groups = [{"params": parameters, "kernels": False}, {"params": kernels, "kernels": True}]
        used = [group for group in groups if group["params"]]
        super().__init__(used, {"lr": 0.0, "weight_decay": weight_decay})
        self.found_inf = torch.tensor(0.0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            if parameters := [p for p in group["params"] if p.grad is not None]:
                self._update(parameters, group["lr"], group["weight_decay"], kernels=group["kernels"])

    def _update(
        self, parameters: list[nn.Parameter], learning_rate: float, weight_decay: float, *, kernels: bool
    ) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        means = [self.state[p]["momentum_buffer"] for p in parameters]
        own, own_means = parallel.local_shards(parameters), parallel.local_shards(means)
        gradients = parallel.local_shards(p.grad for p in parameters)
        # Where the step is skipped the gradient, which may not be finite, is replaced by its mean.
        known = [torch.where(self.found_inf > 0, m, g) for m, g in zip(own_means, gradients, strict=True)]
        torch._foreach_lerp_(own_means, known, 1 - MOMENTUM)
        ahead = torch._foreach_lerp(known, own_means, MOMENTUM)
        whole = [parallel.gathered(n, like) for n, like in zip(ahead, parameters, strict=True)]
        matrices = orthogonalized([n.flatten(1) if kernels else n for n in whole])
        updates = [parallel.shard_of(u.reshape(p.shape), p) for u, p in zip(matrices, parameters, strict=True)]
        rate = learning_rate * (1 - self.found_inf)
        torch._foreach_mul_(own, 1 - rate * weight_decay)
        torch._foreach_sub_(own, torch._foreach_mul(updates, rate))


def orthogonalized(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Each matrix of the parameters with all singular values about 1, times 0.2 sqrt(its longest edge).

    Newton-Schulz iterations X <- a X + (b A + c A^2) X with A = X X^T of all matrices of the same size at once, from
    X / (|X| + `SMALLEST_NORM`). They bring singular values above 0.03 |X| to between 0.68 and 1.2; smaller ones stay
    smaller.
    """
    stacks = [p.flatten(1, -2) if p.ndim > 2 else p.unsqueeze(0) for p in parameters]
    flat = [x.mT if x.shape[1] > x.shape[2] else x for x in stacks]
    found: list[Tensor] = [*flat]
    for shape in {x.shape[1:] for x in flat}:
        places = [place for place, x in enumerate(flat) if x.shape[1:] == shape]
        x = torch.cat([flat[place] for place in places])
        x = x / x.flatten(1).norm(dim=1).add(SMALLEST_NORM).view(-1, 1, 1)
        a, b, c = NEWTON_SCHULZ
        for _ in range(ITERATIONS):
            gram = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        for place, part in zip(places, x.split([len(flat[place]) for place in places]), strict=True):
            found[place] = part * (0.2 * max(shape) ** 0.5)
    tall = [x.shape[1] > x.shape[2] for x in stacks]
    return [(x.mT if t else x).reshape(p.shape) for x, t, p in zip(found, tall, parameters, strict=True)]


class Optimizer:
    """AdamW, or AdamW and Muon for disjoint sets of parameters, with the same learning rate; `parts` has them by name.

    `skip` is a float tensor () on the parameters' device, 1 if the step must change neither parameters nor moments and
    0 otherwise. The host never reads it, so that no step waits for the device.
    """

    def __init__(self, adamw: torch.optim.AdamW, muon: Muon | None) -> None:
        self.parts: dict[str, torch.optim.AdamW | Muon] = (
            {"adamw": adamw} if muon is None else {"adamw": adamw, "muon": muon}
        )

    def step(self, learning_rate: float, skip: Tensor) -> None:
        """Update all parameters that have a gradient; the others, with their moments, stay as they are."""
        for part in self.parts.values():
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.found_inf = skip  # how torch.amp.GradScaler has fused optimizers skip a step
            part.step()

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for part in self.parts.values():
            part.zero_grad()


def make_optimizer(model: nn.Module, config: Training) -> Optimizer:
    """AdamW for all parameters, or Muon for the matrices inside the `HIDDEN` parts and AdamW for the rest.

    Inside are linear maps, Fourier modes and convolutions, which hold nearly all weights. Muon is made for maps of
    hidden channels to hidden channels: stems, heads and embeddings are left to AdamW. Parameters with one axis longer
    than 1 (biases, gains) have no weight decay.

    Raises:
        ConfigFault: Muon for a model without hidden layers.
    """
    inside = [module for name, module in model.named_modules() if HIDDEN & set(name.split("."))]
    kernels = [module.weight for module in inside if isinstance(module, KERNELS)]
    linear = [module.weight for module in inside if isinstance(module, nn.Linear)]
    linear += [module.in_proj_weight for module in inside if isinstance(module, nn.MultiheadAttention)]
    others = [module for module in inside if not isinstance(module, KERNELS)]
    modes = [p for module in others for p in module.parameters(recurse=False) if p.ndim > 2 and min(p.shape[-2:]) > 1]
    hidden = [*linear, *modes, *kernels] if config.optimizer == "muon" else []
    if config.optimizer == "muon" and not hidden:
        raise ConfigFault("optimizer: muon is for models with hidden layers; this one has none: choose adamw")
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in hidden)]
    vectors = [p for p in rest if p.numel() == max(p.shape, default=1)]
    matrices = [p for p in rest if p.numel() > max(p.shape, default=1)]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    muon = Muon([*linear, *modes], config.weight_decay, kernels) if hidden else None
    return Optimizer(adamw, muon)


def learning_rate(config: Training, step: int, valid_losses: Sequence[float] = (), patience: int = 1) -> float:
    """The learning rate of `step`: a linear warm-up to the peak `config.learning_rate`, then `config.schedule`.

    - `cosine`: falls to one hundredth of the peak after the last step;
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
