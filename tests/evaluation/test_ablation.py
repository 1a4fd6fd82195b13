"""The ablation: ratios by hand, a table with every row, and the pipeline from end to end."""

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.evaluation.conftest import TRAINED, unpadded
from tests.performance.conftest import kedro_run
from tests.training.jobs import launched
from tests.untrained import receipt
from ups.evaluation import studies
from ups.evaluation.studies import ablation_text, compare, compression_text
from ups.files import read_json
from ups.surrogate.trained import Trained


def row(variant: str, seed: int, one_step: list[float | None], rollout: list[float | None]) -> dict[str, Any]:
    """Scores of a variant on two families."""
    scores = {"one_step": dict(zip("ab", one_step, strict=True)), "rollout": dict(zip("ab", rollout, strict=True))}
    return {"variant": variant, "seed": seed, "overrides": {"model": {"levels": 2}}, "parameters": 12345} | scores


ROWS = [
    row("base", 0, [0.1, 0.2], [0.5, 0.5]),
    row("base", 1, [0.4, 0.2], [0.5, 0.5]),
    row("u_shape", 0, [0.2, 0.1], [2.0, 0.5]),
    row("u_shape", 1, [0.1, 0.2], [None, 0.5]),
]
SECONDS = {"base": 0.001, "u_shape": 0.006789}


def test_rows_are_relative_to_base_of_their_seed():
    """Ratios to base are averaged geometrically over families; a score that is not finite has no average."""
    relative = [found["relative"] for found in compare(ROWS, SECONDS)]
    assert relative[0] == relative[1] == {"one_step": pytest.approx(1.0), "rollout": pytest.approx(1.0)}
    assert relative[2] == {"one_step": pytest.approx(1.0), "rollout": pytest.approx(2.0)}
    assert relative[3] == {"one_step": pytest.approx(0.5), "rollout": None}


def test_a_family_with_a_diverged_dataset_has_no_score(monkeypatch: pytest.MonkeyPatch):
    """Scores are means over the datasets of a family, of the operator's nRMSE alone; none where one is not finite."""
    scores = [("a", 0.1), ("a", 0.3), ("b", 0.2), ("b", None)]
    records = [
        {"family": family, "method": method, "metric": "nRMSE", "horizon": horizon, "value": value}
        for family, value in scores
        for method, horizon in product(("operator", "codec"), ("one_step", "rollout"))
    ]
    monkeypatch.setattr(studies, "score_sets", lambda *_: records)
    monkeypatch.setattr(studies, "held_out", lambda *_: [])
    surrogate = SimpleNamespace(operator=torch.nn.Linear(3, 2))
    trained = SimpleNamespace(cache=lambda: None, surrogate=lambda device: surrogate)
    found = studies.score_variant(Path(), trained, None, launched(), Path())["row"]
    assert found["one_step"] == found["rollout"] == {"a": pytest.approx(0.2), "b": None}
    assert found["parameters"] == 3 * 2 + 2


def test_table_has_every_row_and_family():
    """Each variant and seed has a line in both tables, with what it changes."""
    lines = unpadded(ablation_text(compare(ROWS, SECONDS)))
    assert "| u_shape | model.levels=2 | 0 | 1 | 2 | 12,345 | 6.79 |" in lines
    assert "| u_shape | model.levels=2 | 1 | 0.5 | not finite | 12,345 | 6.79 |" in lines
    assert "| u_shape | 1 | 0.1 / not finite | 0.2 / 0.5 |" in lines
    assert sum(line.startswith(("| base |", "| u_shape |")) for line in lines) == 2 * len(ROWS)


def test_compression_is_relative_to_the_first_variant_of_the_same_family():
    """Errors have the ratio to those of the first variant in brackets; a tolerance that is not set is left out."""
    first = {"name": "float32", "codec": None, "latents": None, "ratio": 1.0, "codec_error": 1e-7}
    rounded = first | {"name": "rounded", "latents": 0.003, "ratio": 4.0, "codec_error": 0.003, "rounding": 0.001}
    errors = {"a": (0.1, 0.4), "b": (0.2, 0.5)}
    rows = [
        row | {"family": family, "one_step": factor * one, "rollout": factor * all_, "decoded_megabytes_per_second": 9}
        for row, factor in ((first, 1.0), (rounded, 1.5))
        for family, (one, all_) in errors.items()
    ]
    lines = unpadded(compression_text(rows))
    assert "| rounded | 4 | 1.5 | 1.5 |" in lines
    assert "| a | rounded | | 0.003 | 4 | 0.003 | 0.001 | 0.15 (1.5) | 0.6 (1.5) | 9 |" in lines
    assert "| b | float32 | | | 1 | 1e-07 | | 0.2 (1) | 0.5 (1) | 9 |" in lines


def test_the_ratio_of_compression_is_that_of_fields_to_latents(trained: Path, monkeypatch: pytest.MonkeyPatch):
    """Bytes of float32 fields and coefficients over those of the files of latents; errors are those of the scores."""
    latents, plain = receipt(trained, "latent_cache"), dict.fromkeys(TRAINED, "operator") | {"darcy_2d": "steady"}
    records = [
        {"family": family, "method": method, "metric": "nRMSE", "horizon": horizon, "value": value}
        for family in TRAINED
        for method, values in (("codec", (0.1, 0.4)), (plain[family], (0.2, 0.3)))
        for horizon, value in zip(("one_step", "rollout"), values, strict=True)
    ]
    monkeypatch.setattr(studies, "score_sets", lambda *_: records)
    models = Trained(latents, {stage: receipt(trained, stage) for stage in ("codec", "operator", "steady")}, trained)
    found = studies.score_compression(Path(), models, None, launched(), trained / "01_raw")["rows"]
    rows = {row["family"]: row for row in found}
    for family, name, num_values in (("advection_1d", "1D_Advection*", 5 * 8), ("darcy_2d", "2D_Darcy*", 2 * 8 * 6)):
        shards = [path for path in (trained / latents["path"]).glob(f"{name}/*/c/**/*") if path.is_file()]
        assert rows[family]["ratio"] == 5 * num_values * 4 / sum(path.stat().st_size for path in shards)
    assert all((row["codec_error"], row["one_step"], row["rollout"]) == (0.1, 0.2, 0.3) for row in found)


@pytest.mark.slow
def test_pipeline_trains_each_variant_once(tmp_path: Path):
    """Every variant is trained and scored on all transient families; the second run finds all of it up to date."""
    kedro_run(tmp_path, "data")
    kedro_run(tmp_path, "training")
    first, second = (kedro_run(tmp_path, "ablation").stdout for _ in range(2))
    rows = read_json(tmp_path / "08_reporting/ablation.json")
    assert [found["variant"] for found in rows] == ["base", "windows", "unrolled"]
    assert rows[0]["relative"] == {"one_step": pytest.approx(1.0), "rollout": pytest.approx(1.0)}
    assert all(set(found["rollout"]) == {"advection_1d", "diffusion_reaction_2d"} for found in rows)
    assert len({json.dumps(found["rollout"]) for found in rows}) == 3
    assert first.count("score_") == 6 and first.count("up to date") == 1  # base is what `training` trained
    assert second.count("running") == 0 and second.count("up to date") == 7
    assert all(found["milliseconds_per_step"] > 0 for found in rows)
    assert "unroll.horizon=2" in (tmp_path / "08_reporting/ablation.md").read_text()
