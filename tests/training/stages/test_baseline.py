"""Stage `baseline`: what a model on the grid is trained on."""

from pathlib import Path

import numpy as np
import pytest

from tests.test_parameters import typed
from tests.training.jobs import launched
from tests.untrained import make_root_of, receipt
from ups.config import LatentsConfig
from ups.pipelines.baselines import make_identity_codec
from ups.pipelines.training import encode_latents
from ups.runs.run import Run
from ups.runs.stage_cache import Receipt
from ups.training.stages import baseline


@pytest.fixture
def fields(tmp_path: Path) -> Receipt:
    """Latents of the identity codec below the test's folder."""
    root = make_root_of(tmp_path, ("advection_1d",), count=5)
    datasets, options = (
        receipt(root, "datasets"),
        (LatentsConfig(tolerance=None, on_disk=True), launched(num_processes=1)),
    )
    codec = make_identity_codec(datasets, receipt(root, "normalization"), root)
    return encode_latents(datasets, codec, *options, root / "01_raw", root)


@pytest.mark.parametrize(
    ("longest", "families", "horizon"),
    [(1, None, 1), (3, None, 3), (3, ["advection_1d"], 3), (3, ["burgers_1d"], 1)],
)
def test_a_baseline_is_unrolled_as_the_operator_is(
    longest: int, families: list[str] | None, horizon: int, fields: Receipt, tmp_path: Path
):
    """Training windows have as many steps as the baselines unroll, and need their memory; validation samples one."""
    config, operator = typed().baselines, typed().operator
    unroll = operator.unroll.model_copy(update={"horizon": longest, "families": families})
    operator = operator.model_copy(update={"unroll": unroll})
    start, inputs = config.start("linear", "advection_1d"), {"latent_cache": fields}
    section = config.section("linear", "advection_1d", 10, start, operator, typed().steady)
    run = Run(tmp_path, "baseline", "", section.model_dump(), inputs, launched(), "cpu", tmp_path)
    stage, first = baseline.build(section, run), np.zeros(2, int)
    assert len(stage.train.load("advection_1d", first).states(9)) == horizon + 1
    assert len(stage.valid.load("advection_1d", first).states(9)) == 2
    assert stage.sample_bytes["advection_1d"] == 4 * stage.num_tokens["advection_1d"] * 20 * 4 * horizon
