"""stub"""

import math
import torch


class Opt:
    def __init__(self, model, config):
        m = [p for p in model.parameters() if p.ndim >= 2]
        v = [p for p in model.parameters() if p.ndim < 2]
        self.members = [
            torch.optim.AdamW(
                [{"params": m, "weight_decay": config.weight_decay}, {"params": v, "weight_decay": 0.0}],
                lr=config.learning_rate,
                betas=(0.9, 0.98),
                fused=True,
            )
        ]

    def step(self, lr, skip):
        for o in self.members:
            o.found_inf = skip
            o.grad_scale = None
            for g in o.param_groups:
                g["lr"] = lr
            o.step()

    def zero_grad(self):
        for o in self.members:
            o.zero_grad(set_to_none=True)


def make_optimizer(model, config):
    return Opt(model, config)


def learning_rate(config, step, valid_losses):
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
