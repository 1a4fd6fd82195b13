"""PDEBench's protocol against its definitions, written a second time."""

import math

import torch

from ups.evaluation.protocol import PADDING, PublishedFNO, SpectralConvolution, grid_points, predict_from, rollout_loss


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
