"""Arrays of a dataset as the evaluation writes them for figures, filled with random numbers."""

import numpy as np

METHODS = ("persistence", "codec", "operator")


def random_arrays(grid: tuple[int, ...], num_fields: int, num_times: int = 5, wrong: float = 0.0) -> dict:
    """Three trajectories with all times shown, whose predictions are off by noise and `wrong`; one time is steady."""
    generator = np.random.default_rng(0)
    times, num_steps = np.linspace(0, 1, num_times), max(1, num_times - 1)
    arrays = {"title": np.array("Equation, ν = 1"), "times": times, "shown": times}
    for factor, role in enumerate(("best", "median", "worst"), start=1):
        truth = generator.standard_normal((num_times, num_fields, *grid), dtype=np.float32)
        noise = 0.1 * factor * generator.standard_normal(truth.shape, dtype=np.float32)
        errors = np.outer(0.1 * factor * np.arange(1, num_steps + 1), np.arange(1, num_fields + 1))
        arrays |= {f"{role}/truth": truth, f"{role}/nRMSE": errors}
        arrays[f"{role}/prediction"] = truth + noise + np.float32(wrong)
    method_errors = np.linspace(0.01, 0.2, num_steps)
    for method in METHODS:
        arrays |= {f"curve/{method}": method_errors, f"band/{method}": np.stack([method_errors / 2, 2 * method_errors])}
        arrays[f"spectrum/{method}"] = np.geomspace(1.0, 1e-6, 12)
    return arrays | {"spectrum/truth": np.geomspace(2.0, 2e-16, 12)}
