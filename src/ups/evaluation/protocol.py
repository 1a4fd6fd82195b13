"""PDEBench's own protocol: its FNO with its recipe, and the trained models from the same start, by its metrics.

The published FNO takes given snapshots and the coordinates of the points, and predicts the next snapshot.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ups.config import ProtocolConfig
from ups.config.evaluation import ProtocolSizes
from ups.data.families import base_of
from ups.data.pdebench import FAMILIES
from ups.data.trajectories import TrajectoryReader
from ups.errors import ConfigFault, Diverged
from ups.evaluation.predictions import plain_method
from ups.evaluation.scores import TrajectorySet
from ups.evaluation.tables import finite, table
from ups.metrics.pdebench import CompatSuite, MetricSuite, snapshot_errors
from ups.surrogate.surrogate import Setting, Surrogate, rollout

log = logging.getLogger(__name__)

PADDING = 2  # points of zeros after the last one of every axis; the published 3D network has 6 after one axis
PROJECTION_CHANNELS = 128
METRICS = ("nRMSE", "RMSE", "cRMSE", "bRMSE", "max_error", "fRMSE_low", "fRMSE_mid", "fRMSE_high")


def score_protocol(
    surrogate: Surrogate, test: TrajectorySet, train: Iterable[int], config: ProtocolConfig, device: torch.device
) -> list[dict[str, Any]]:
    """Records of the published FNO, trained on the trajectories `train`, and of the surrogate's plain method.

    Both predict what follows the first `initial_step` snapshots; the surrogate sees only the last of them, and the one
    before it where the family has a history.

    Raises:
        ConfigFault: no snapshot follows them, or a steady family has not one coefficient per field.
        Diverged: a loss of the FNO is not finite.
    """
    sizes = config.of(base_of(test.dataset.family))
    u_train, u_test = (read_snapshots(test, part).to(device) for part in (train, test.indices))
    initial_step = 1 if FAMILIES[test.dataset.family].steady else sizes.initial_step
    if u_test.shape[1] <= initial_step:
        what = f"{test.dataset.name}: {u_test.shape[1]} snapshots, of which protocol gives {initial_step}"
        raise ConfigFault(f"{what}; use more snapshots or a smaller protocol initial_step of this family")
    predictions = {
        "fno_pdebench": train_fno(u_train, u_test, test, sizes, config, initial_step),
        plain_method(test.dataset.family): predict_plain(surrogate, u_test, test, initial_step),
    }
    return [_record(method, u_pred, u_test, test, initial_step) for method, u_pred in predictions.items()]


def read_snapshots(trajectories: TrajectorySet, indices: Iterable[int]) -> Tensor:
    """Raw values (B, T, C, *grid); of a steady family the coefficient and the solution count as two snapshots."""
    family = FAMILIES[trajectories.dataset.family]
    if family.steady and len(family.coefficients) != len(family.fields):
        what = f"{family.name}: {len(family.coefficients)} coefficients, {len(family.fields)} fields"
        raise ConfigFault(f"{what}; PDEBench's protocol needs as many of both: leave the family out")
    with TrajectoryReader(trajectories.folder, trajectories.dataset) as reader:
        rows = []
        for index in indices:
            u = torch.from_numpy(reader.read(index))
            given = [torch.from_numpy(reader.read_coefficients(index))[None]] if family.steady else []
            rows.append(torch.cat([*given, u]))
    return torch.stack(rows)


def train_fno(
    u_train: Tensor,
    u_test: Tensor,
    test: TrajectorySet,
    sizes: ProtocolSizes,
    config: ProtocolConfig,
    initial_step: int,
) -> Tensor:
    """Predictions for `u_test` of the FNO after PDEBench's training: Adam, halved rate, loss summed over the rollout.

    As published, the weights with the lowest loss on the test trajectories are used, which favours this FNO.
    """
    torch.manual_seed(config.seed)
    dataset, device = test.dataset, u_train.device
    points = grid_points(dataset.grid, dataset.lengths).to(device)
    channels, modes = u_train.shape[2], min(sizes.modes, min(dataset.grid) // 2)
    shape = {"num_dims": len(dataset.grid), "modes": modes, "hidden_channels": sizes.hidden_channels}
    model = PublishedFNO(initial_step * channels, channels, num_layers=config.num_layers, **shape).to(device)
    optimizer = torch.optim.Adam(model.parameters(), config.learning_rate, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, config.halve_every, gamma=0.5)
    batch_size = FAMILIES[dataset.family].pdebench_batch_size
    u_train, lowest, best = u_train[:, : sizes.train_snapshots], float("inf"), None
    for epoch in range(1, config.epochs + 1):
        for rows in torch.randperm(len(u_train)).split(batch_size):
            u = u_train[rows.to(device)]
            loss = rollout_loss(predict_from(model, u, points, initial_step), u[:, initial_step:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        if epoch % config.select_every and epoch != config.epochs:
            continue
        u_pred = _predict(model, u_test, points, initial_step, batch_size)
        tested = float(rollout_loss(u_pred, u_test[:, initial_step:]))
        log.info("%s, epoch %d of %d: test loss %.4g", dataset.name, epoch, config.epochs, tested)
        if tested < lowest:
            lowest, best = tested, u_pred
    if best is None:
        raise Diverged(f"fno_pdebench of {dataset.name}: the loss is not finite; lower protocol.learning_rate")
    return best


def rollout_loss(u_pred: Tensor, u_ref: Tensor) -> Tensor:
    """The sum over times of the mean squared error, of (B, T, C, *grid)."""
    return (u_pred - u_ref).square().mean(dim=0).flatten(1).mean(dim=1).sum()


@torch.no_grad()
def _predict(model: nn.Module, u: Tensor, points: Tensor, initial_step: int, batch_size: int) -> Tensor:
    return torch.cat([predict_from(model, part, points, initial_step) for part in u.split(batch_size)])


@torch.no_grad()
def predict_plain(surrogate: Surrogate, u: Tensor, test: TrajectorySet, initial_step: int) -> Tensor:
    """Rollout of operator or steady model from the first `initial_step` snapshots of u (B, T, C, *grid)."""
    family, predicted = test.dataset.family, []
    condition = torch.tensor([test.condition], device=u.device)
    with TrajectoryReader(test.folder, test.dataset) as reader:
        for place, index in enumerate(test.indices):
            coefficients = torch.from_numpy(reader.read_coefficients(index))[None].to(u.device)
            given = _coefficient_tokens(surrogate, coefficients, test)
            step = surrogate.plain_step(Setting(family, test.domain, given, condition))
            given_u = u[place : place + 1, max(0, initial_step - 2) : initial_step].flip(1)
            z = surrogate.as_stored(surrogate.encode(given_u, family), family)
            # The last given snapshot, then the one before, if there is one: see `History`.
            z = torch.zeros_like(z[:, 0]) if FAMILIES[family].steady else torch.cat(z.unbind(1), -1)
            predicted.append(surrogate.decode(rollout(step, z, u.shape[1] - initial_step), family))
    return torch.cat(predicted)


def _coefficient_tokens(surrogate: Surrogate, coefficients: Tensor, test: TrajectorySet) -> Tensor:
    """Latents of the coefficients (1, C_c, *grid); (1, N, 0) where the family has none."""
    if not coefficients.shape[1]:
        return coefficients.new_zeros(1, test.num_tokens // len(test.dataset.times), 0)
    family = test.dataset.family
    return surrogate.as_stored(surrogate.encode(coefficients, family, "coefficients"), family)


def _record(method: str, u_pred: Tensor, u: Tensor, test: TrajectorySet, initial_step: int) -> dict[str, Any]:
    errors = snapshot_errors(u_pred, u[:, initial_step:])
    batch_size = FAMILIES[test.dataset.family].pdebench_batch_size
    compat, suite = CompatSuite(u.ndim - 3, batch_size, initial_step), MetricSuite()
    compat.add(errors)
    suite.add(errors)
    names = {"dataset": test.dataset.name, "family": test.dataset.family, "method": method}
    about = {"initial_step": initial_step, "subsample": asdict(test.dataset.subsample)}
    found = {"metrics": finite(suite.compute()), "pdebench": finite(compat.compute())}
    return names | about | {"num_trajectories": suite.num_trajectories} | found


def protocol_text(records: Iterable[dict[str, Any]]) -> str:
    """A Markdown table: nRMSE of the predicted snapshots alone, then the metrics as PDEBench's papers computed them."""
    columns = ["dataset", "method", "given", "nRMSE", *(f"{name} (as published)" for name in METRICS)]
    return table(columns, map(_cells, records), num_names=2) + "\n"


def _cells(record: dict[str, Any]) -> list[str]:
    values = [record["metrics"]["nRMSE"], *(record["pdebench"].get(name) for name in METRICS)]
    shown = ["–" if value is None else f"{value:.3g}" for value in values]
    return [record["dataset"], record["method"], str(record["initial_step"]), *shown]


class SpectralConvolution(nn.Module):
    """v_hat(k) = W(k) u_hat(k) for the `modes` lowest frequencies of each sign on every axis, 0 for all others.

    Li et al. 2020, arXiv:2010.08895, equation 5.
    """

    def __init__(self, channels: int, modes: int, num_dims: int) -> None:
        super().__init__()
        self.modes, self.num_dims = modes, num_dims
        shape = (2 ** (num_dims - 1), channels, channels, *[modes] * num_dims, 2)
        self.weight = nn.Parameter(torch.rand(shape) / channels**2)

    def forward(self, u: Tensor) -> Tensor:
        """Fields (B, C, *grid) to (B, C, *grid)."""
        axes = tuple(range(2, 2 + self.num_dims))
        u_hat = torch.fft.rfftn(u, dim=axes)
        v_hat = torch.zeros_like(u_hat)
        low, high = slice(None, self.modes), slice(-self.modes, None)
        # The last axis of the transform of a real field has frequencies >= 0 only.
        for signs, weight in zip(product((low, high), repeat=self.num_dims - 1), self.weight, strict=True):
            block = (slice(None), slice(None), *signs, low)
            v_hat[block] = torch.einsum("bi...,io...->bo...", u_hat[block], torch.view_as_complex(weight))
        return torch.fft.irfftn(v_hat, s=u.shape[2:], dim=axes)


class PublishedFNO(nn.Module):
    """Lift, `num_layers` times v <- GELU(spectral(v) + pointwise(v)) (the last without GELU), project."""

    def __init__(
        self, in_channels: int, out_channels: int, *, num_dims: int, modes: int, hidden_channels: int, num_layers: int
    ) -> None:
        super().__init__()
        self.lift = nn.Linear(in_channels + num_dims, hidden_channels)
        self.spectral = nn.ModuleList(SpectralConvolution(hidden_channels, modes, num_dims) for _ in range(num_layers))
        self.pointwise = nn.ModuleList(nn.Linear(hidden_channels, hidden_channels) for _ in range(num_layers))
        self.project = nn.Sequential(
            nn.Linear(hidden_channels, PROJECTION_CHANNELS), nn.GELU(), nn.Linear(PROJECTION_CHANNELS, out_channels)
        )

    def forward(self, window: Tensor, points: Tensor) -> Tensor:
        """Snapshots (B, T, C, *grid) and coordinates (*grid, axes) to the next snapshot (B, C, *grid)."""
        u = torch.cat([window.flatten(1, 2).movedim(1, -1), points.expand(len(window), *points.shape)], -1)
        v = nn.functional.pad(self.lift(u).movedim(-1, 1), [0, PADDING] * (points.ndim - 1))
        for layer, (spectral, pointwise) in enumerate(zip(self.spectral, self.pointwise, strict=True)):
            v = spectral(v) + pointwise(v.movedim(1, -1)).movedim(-1, 1)
            v = nn.functional.gelu(v) if layer < len(self.spectral) - 1 else v
        inner = v[(..., *[slice(None, -PADDING)] * (points.ndim - 1))]
        return self.project(inner.movedim(1, -1)).movedim(-1, 1)


def grid_points(grid: Sequence[int], lengths: Sequence[float]) -> Tensor:
    """Coordinates of the cell centres of a domain that begins at 0: (*grid, axes)."""
    axes = [(torch.arange(n) + 0.5) * length / n for n, length in zip(grid, lengths, strict=True)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)


def predict_from(model: nn.Module, u: Tensor, points: Tensor, initial_step: int) -> Tensor:
    """Predict the snapshots after the first `initial_step` of u (B, T, C, *grid): (B, T - initial_step, C, *grid).

    Each is predicted from the `initial_step` before it, the given ones first and then predictions.
    """
    window, predicted = u[:, :initial_step], []
    for _ in range(u.shape[1] - initial_step):
        predicted.append(model(window, points))
        window = torch.cat([window[:, 1:], predicted[-1][:, None]], 1)
    return torch.stack(predicted, 1)
