"""PDEBench's protocol against its definitions, written a second time."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.evaluation.conftest import TRAINED, unpadded
from tests.evaluation.test_external import LAUNCH
from tests.untrained import receipt
from ups.config import ProtocolConfig
from ups.errors import ConfigFault, Diverged
from ups.evaluation import protocol
from ups.evaluation.protocol import (
    METRICS,
    PADDING,
    PublishedFNO,
    SpectralConvolution,
    grid_points,
    predict_from,
    predict_plain,
    protocol_text,
    read_snapshots,
    rollout_loss,
    score_protocol,
    train_fno,
)
from ups.evaluation.scores import TrajectorySet, held_out
from ups.metrics.errors import nRMSE
from ups.pipelines.evaluation import compare_by_protocol
from ups.surrogate.surrogate import Setting, Surrogate
from ups.surrogate.trained import Trained

SIZES = {"initial_step": 2, "modes": 2, "hidden_channels": 4, "train_snapshots": None}
OPTIONS = {"seed": 0, "epochs": 2, "learning_rate": 1e-3, "weight_decay": 0.0, "halve_every": 1, "select_every": 1}
CONFIG = ProtocolConfig.model_validate(OPTIONS | {"num_layers": 2, "default": SIZES, "families": {}})


def models(trained: Path) -> dict[str, dict[str, Any]]:
    """The receipts of the models without corrector."""
    return {stage: receipt(trained, stage) for stage in ("codec", "operator", "steady")}


def given(trained: Path, family: str) -> tuple[Surrogate, TrajectorySet, Tensor]:
    """The models, the test split of a family, and its snapshots (B, T, C, *grid)."""
    of_root = Trained(receipt(trained, "latent_cache"), models(trained), trained)
    sets = held_out(of_root.cache(), trained / "01_raw")
    (test,) = (each for each in sets if each.dataset.family == family)
    return of_root.surrogate("cpu"), test, read_snapshots(test, test.indices)


@pytest.fixture(scope="module")
def compared(trained: Path) -> tuple[list[dict[str, Any]], str]:
    """Records and table of the FNO and the models of five families."""
    cache = receipt(trained, "latent_cache")
    return compare_by_protocol(cache, CONFIG, LAUNCH, trained / "01_raw", trained, **models(trained))


def record_of(records: list[dict[str, Any]], family: str, method: str) -> dict[str, Any]:
    """The only record of this method."""
    (record,) = (r for r in records if (r["family"], r["method"]) == (family, method))
    return record


def test_fno_and_models_are_scored_on_every_family(compared: tuple[list[dict[str, Any]], str]):
    """A finite record of each, and a line of the table."""
    records, text = compared
    plain = {family: "steady" if family == "darcy_2d" else "operator" for family in TRAINED}
    assert {(r["family"], r["method"]) for r in records} == {(f, "fno_pdebench") for f in TRAINED} | set(plain.items())
    assert all(record["metrics"]["nRMSE"] is not None for record in records)
    assert text == protocol_text(records) and text.count("\n|") == len(records) + 1


@torch.no_grad()
def test_the_operator_starts_from_the_last_given_snapshot(trained: Path, compared: tuple[list[dict[str, Any]], str]):
    """Of five snapshots two are given: nRMSE of a rollout of three steps, as published 3 / 5 of it."""
    surrogate, test, u = given(trained, "advection_1d")
    z, predicted = surrogate.encode(u[:, 1], "advection_1d"), []
    condition = torch.tensor([test.condition]).expand(len(u), -1)
    step = surrogate.plain_step(Setting("advection_1d", test.domain, z[..., :0], condition))
    for _ in range(3):
        z = step(z)
        predicted.append(surrogate.decode(z, "advection_1d"))
    expected = float(nRMSE(torch.stack(predicted, 1), u[:, 2:]).mean())
    record = record_of(compared[0], "advection_1d", "operator")
    assert record["metrics"]["nRMSE"] == pytest.approx(expected, rel=1e-5)
    assert record["pdebench"]["nRMSE"] == pytest.approx(3 / 5 * expected, rel=1e-5)
    assert record["num_trajectories"] == len(u) and record["initial_step"] == 2


@torch.no_grad()
def test_the_steady_model_starts_from_the_coefficient(trained: Path, compared: tuple[list[dict[str, Any]], str]):
    """Coefficient and solution count as two snapshots: nRMSE of the solution, as published half of it."""
    surrogate, test, u = given(trained, "darcy_2d")
    coefficients = surrogate.encode(u[:, 0], "darcy_2d", "coefficients")
    z = torch.zeros_like(surrogate.encode(u[:, 1], "darcy_2d"))
    condition = torch.tensor([test.condition]).expand(len(u), -1)
    step = surrogate.plain_step(Setting("darcy_2d", test.domain, coefficients, condition))
    expected = float(nRMSE(surrogate.decode(step(z), "darcy_2d")[:, None], u[:, 1:]).mean())
    record = record_of(compared[0], "darcy_2d", "steady")
    assert record["metrics"]["nRMSE"] == pytest.approx(expected, rel=1e-5)
    assert record["pdebench"]["nRMSE"] == pytest.approx(expected / 2, rel=1e-5)


@pytest.mark.parametrize(("initial_step", "seen"), [(1, [0]), (3, [2, 1])])
def test_a_state_has_the_last_two_given_snapshots(
    trained: Path, monkeypatch: pytest.MonkeyPatch, initial_step: int, seen: list[int]
):
    """The last one, and after it the one before, if there is one."""
    states = []
    monkeypatch.setattr(protocol, "rollout", lambda step, z, num_steps: states.append(z) or z[:, None])
    surrogate, test, u = given(trained, "advection_1d")
    predict_plain(surrogate, u, test, initial_step)
    expected = torch.cat([surrogate.encode(u[:, time], "advection_1d") for time in seen], -1)
    assert torch.allclose(torch.cat(states), expected)


def test_the_weights_with_the_lowest_test_loss_are_used(trained: Path, caplog: pytest.LogCaptureFixture):
    """Of six epochs, of which the last is not the best, the predictions have the lowest loss that was logged."""
    caplog.set_level(logging.INFO)
    _, test, u = given(trained, "advection_1d")
    config = CONFIG.model_copy(update={"epochs": 6, "learning_rate": 0.1, "halve_every": 100})
    u_pred = train_fno(u, u, test, config.default, config, initial_step=2)
    losses = [record.args[-1] for record in caplog.records if record.name == protocol.__name__]
    assert len(losses) == 6 and losses[-1] > min(losses)
    assert float(rollout_loss(u_pred, u[:, 2:])) == pytest.approx(min(losses))


@pytest.mark.parametrize(
    ("sizes", "options", "fault"),
    [({"initial_step": 5}, {}, ConfigFault), ({}, {"learning_rate": 1e30}, Diverged)],
    ids=["no snapshot follows", "diverged"],
)
def test_what_cannot_be_compared_is_a_fault(
    trained: Path, sizes: dict[str, int], options: dict[str, float], fault: type[Exception]
):
    """It names the dataset and what to change."""
    surrogate, test, _ = given(trained, "advection_1d")
    config = CONFIG.model_copy(update={"default": CONFIG.default.model_copy(update=sizes)} | options)
    with pytest.raises(fault, match=r"1D_Advection_Sols_beta0.4.* protocol.(initial_step|learning_rate)|use more"):
        score_protocol(surrogate, test, test.indices, config, torch.device("cpu"))


def test_the_table_has_both_kinds_of_metrics():
    """Three digits of the own nRMSE and of the eight published metrics; a dash for what is not there."""
    published = dict.fromkeys(METRICS, 0.25) | {"nRMSE": 0.074074, "RMSE": None}
    del published["fRMSE_high"]
    names = {"dataset": "waves", "method": "operator", "initial_step": 2}
    header, _, line = unpadded(protocol_text([names | {"metrics": {"nRMSE": 0.123456}, "pdebench": published}]))
    assert header.startswith("| dataset | method | given | nRMSE | nRMSE (as published) | RMSE (as published) |")
    assert line == "| waves | operator | 2 | 0.123 | 0.0741 | – | 0.25 | 0.25 | 0.25 | 0.25 | 0.25 | – |"


def test_every_prediction_sees_the_snapshots_before_it():
    """Of T snapshots the first are given; each later one is predicted from as many before it, given or predicted."""
    seen = []

    def model(window: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        seen.append(window[0, :, 0, 0].tolist())
        return -window[:, -1].abs() - 1

    u = torch.arange(1.0, 7.0).reshape(1, 6, 1, 1)
    u_pred = predict_from(model, u, torch.zeros(1, 1), initial_step=3)
    assert seen == [[1, 2, 3], [2, 3, -4], [3, -4, -5]]
    assert u_pred[0, :, 0, 0].tolist() == [-4, -5, -6]


def test_spectral_convolution_is_a_product_per_frequency():
    """Of a wave below the cut-off the amplitude is multiplied by its weight; waves above it vanish."""
    torch.manual_seed(0)
    convolution, x = SpectralConvolution(1, 4, 2), torch.arange(16) / 16 * 2 * math.pi
    for k_x, k_y, block in ((2, 3, 0), (-2, 3, 1)):
        phase = k_x * x[:, None] + k_y * x[None]
        weight = torch.view_as_complex(convolution.weight.detach())[block, 0, 0, k_x if k_x >= 0 else 4 + k_x, k_y]
        expected = (weight * torch.exp(1j * phase)).real
        with torch.no_grad():
            assert torch.allclose(convolution(phase.cos()[None, None])[0, 0], expected, atol=1e-5)
    assert convolution((5 * x[:, None] + 0 * x).cos()[None, None]).abs().max() < 1e-5


def test_fno_has_the_published_number_of_weights():
    """1D, 10 snapshots of one field, 12 modes, width 20: the layers' weights counted by hand."""
    model = PublishedFNO(10, 1, num_dims=1, modes=12, hidden_channels=20, num_layers=4)
    by_hand = (11 * 20 + 20) + 4 * (2 * 20 * 20 * 12 + 20 * 20 + 20) + (20 * 128 + 128) + (128 + 1)
    assert sum(weight.numel() for weight in model.parameters()) == by_hand
    assert PADDING == 2 and model(torch.randn(3, 10, 1, 32), grid_points([32], [1.0])).shape == (3, 1, 32)


def test_points_are_cell_centres():
    """Coordinates of two cells on (0, 1) and three on (0, 3), with the axes last."""
    points = grid_points([2, 3], [1.0, 3.0])
    assert points.shape == (2, 3, 2) and points[1, 2].tolist() == [0.75, 2.5]


def test_loss_is_the_sum_over_times_of_mean_squares():
    """An error of 1 at the first and 2 at the second time gives 1 + 4, whatever the grid."""
    error = torch.tensor([1.0, 2.0])[None, :, None, None].expand(5, 2, 3, 7)
    assert math.isclose(float(rollout_loss(error, torch.zeros_like(error))), 5.0)
