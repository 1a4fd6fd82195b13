"""Training stages in Lightning (extra `lightning`): a user's Trainer, callbacks and loggers instead of the loop.

Each step is that of the loop, by the same `Update` within manual optimization: backward passes, exchange of gradients,
clipping, skipped steps and averaging of weights are ours, so that the Trainer's own precision and gradient clipping
stay unset. Loading of batches, learning rate, validation and the checks of losses are the loop's as well.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L
import torch
import torch.distributed as dist

from ups.config.training import TrainingSection
from ups.data.pdebench import FAMILIES
from ups.errors import ConfigFault
from ups.files import WEIGHTS
from ups.runs.run import Run
from ups.training.batches import Batches, Share
from ups.training.checkpoints import publish_tensors
from ups.training.distributed import Ranks, with_agreed_memory
from ups.training.history import TrainingHistory
from ups.training.injection import Injection
from ups.training.loop import validate
from ups.training.optimizers import learning_rate
from ups.training.parallel import full_state
from ups.training.stage import Stage
from ups.training.stages import STAGES
from ups.training.update import StepResult, Update


def trainer_options(config: TrainingSection) -> dict[str, Any]:
    """Arguments of a Trainer that takes as many steps, and logs and validates as often, as the loop."""
    validation = {"val_check_interval": config.validate_every, "check_val_every_n_epoch": None}
    return {"max_steps": config.steps, "log_every_n_steps": config.log_every, "num_sanity_val_steps": 0} | validation


class CountedSteps(torch.optim.Optimizer):
    """What Lightning counts steps by and reads the learning rate from; `Update`, called in a step, has the moments."""

    def __init__(self, parameters: Iterator[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: Callable[[], StepResult]) -> StepResult:  # type: ignore[override]
        """Take a step."""
        return closure()


class StageModule(L.LightningModule):
    """A training stage; `model` has the weights of the optimizer, `update.average` those that are the result.

    Files are written into `run.folder`, at the end `weights.pt` as the loop writes it. A checkpoint of Lightning has
    all that the next step depends on. When to save, SIGTERM and restarts are left to Lightning. The last step is
    validated if `config.validate_every` divides it; terms of the loss are not logged.
    """

    def __init__(self, stage: Stage, config: TrainingSection, run: Run) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.stage, self.config, self.run, self.model = stage, config, run, stage.model

    @classmethod
    def of_run(cls, trained: Path, folder: Path) -> "StageModule":
        """The stage that the run folder `trained` describes, untrained, with the same inputs; files go to `folder`."""
        run = replace(Run.read(trained.resolve()), folder=folder.resolve())
        FAMILIES.define(*run.families)
        entry = STAGES[run.stage]
        config = entry.config(**run.config)
        torch.manual_seed(config.seed)
        return cls(entry.build(config, run), config, run)

    def setup(self, stage: str) -> None:
        """Join the ranks that Lightning has started; raises `ConfigFault` for a sharded model."""
        device, world_size = self.trainer.strategy.root_device, self.trainer.world_size
        if world_size > 1 and self.run.launch.sharding != "ddp":
            raise ConfigFault(f"Lightning replicates models: launch.sharding = {self.run.launch.sharding} must be ddp")
        control = dist.new_group(backend="gloo") if world_size > 1 else None
        self.ranks = Ranks(self.trainer.global_rank, world_size, device, control)
        self.run.folder.mkdir(parents=True, exist_ok=True)
        self.run = with_agreed_memory(replace(self.run, device=device.type), self.ranks)
        self.inject = Injection.read(self.run.folder, self.ranks.rank)
        self.update = Update(self.stage, self.config, self.run, self.ranks, self.inject)
        self.history = TrainingHistory(self.run.stage, device)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Optimizers are within `update`."""
        return CountedSteps(self.model.parameters())

    def training_step(self, share: Share, batch_idx: int) -> None:
        """One step of this rank; raises the loop's `Diverged` and `OutOfMemory`."""
        half_patience = max(1, (self.config.patience or 0) // 2)
        rate = learning_rate(self.config, share.step, self.history.valid_losses, half_patience)
        optimizer = self.optimizers()
        optimizer.param_groups[0]["lr"] = rate
        outcome = optimizer.step(lambda: self.update(share, rate, stop=False, save=False))
        self.history.add(outcome, share)
        if self.history.step % self.config.log_every == 0 or self.history.step == self.config.steps:
            metrics = self.history.metrics(self.update, self.config, self.ranks)
            self.log_dict(metrics | {"learning_rate": rate}, batch_size=share.size)

    def validation_step(self, batch: int, batch_idx: int) -> None:
        """Score the averaged weights on the batches of the loop's validation; stop after `config.patience` of them."""
        losses = validate(self.stage, self.update.average, self.config, self.run, self.ranks)
        valid_loss = fmean(losses.values())
        by_key = {f"valid_loss/{key}": loss for key, loss in losses.items()}
        self.log_dict({"valid_loss": valid_loss} | by_key, batch_size=1)
        if self.trainer.sanity_checking:
            return
        self.history.add_validation(losses, self.update, keep_best=self.config.patience is not None)
        if self.stage.after_validation is not None and self.history.step < self.config.steps:
            for model in (self.update.model, self.update.average):
                self.stage.after_validation(model, losses)
        self.trainer.should_stop |= self.history.is_exhausted(self.config.patience)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the state of `update` and of the history (collective)."""
        checkpoint["update"], checkpoint["progress"] = self.update.state(), self.history.state(self.ranks)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what `on_save_checkpoint` added."""
        self.update.restore(checkpoint["update"])
        self.history.restore(checkpoint["progress"], self.ranks)

    def on_train_end(self) -> None:
        """Write the weights: the best with early stopping, else the last."""
        weights = self.history.best or full_state(self.update.average)
        if self.ranks.rank == 0:
            publish_tensors(self.run.folder / WEIGHTS, {"settings": self.stage.settings, "weights": weights})
        self.ranks.barrier()


class StageData(L.LightningDataModule):
    """Batches of a stage, shared by the ranks as in the loop; begins at the step of the checkpoint."""

    def __init__(self, module: StageModule) -> None:
        super().__init__()
        self.module = module

    def __iter__(self) -> Iterator[Share]:
        module, first = self.module, self.module.history.step
        validations = module.history.validations
        batches = Batches(module.stage, module.config, module.run, module.ranks, module.inject, validations)
        with batches.from_step(first):
            for _ in range(first, module.config.steps):
                yield batches.next()

    def train_dataloader(self) -> "StageData":
        """This rank's share of every global batch."""
        return self

    def val_dataloader(self) -> list[int]:
        """One entry: `StageModule.validation_step` reads the fixed batches itself."""
        return [0]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Micro-batches move one by one, in `Update`."""
        return batch
