"""Selection with models of random weights: what it costs is what was computed."""

from pathlib import Path

from tests.evaluation.test_external import stages
from tests.evaluation.test_selection import CONFIG
from tests.untrained import receipt
from ups.config.evaluation import Start
from ups.evaluation.selection import select_all
from ups.surrogate.trained import Trained

NUM_STEPS = 4  # of the five snapshots in the files


def test_evaluations_count_every_network(trained: Path):
    """Per time step one of the operator, and for each member of a diffusion in three steps three of the denoiser."""
    models = Trained(receipt(trained, "latent_cache"), stages(trained), trained)
    config = CONFIG.model_copy(update={"sampler": "diffusion", "if_corrector_off": Start(sigma=5.0, num_steps=3)})
    records = select_all(models, config, "cpu", trained / "01_raw")["records"]
    of_one = [r for r in records if (r["family"], r["split"]) == ("advection_1d", "valid")]
    found = {(r["method"], r["num_members"]): r["evaluations"] for r in of_one}
    assert found["operator", 1] == NUM_STEPS
    assert found["single", 1] == NUM_STEPS * (1 + 3)
    assert {found[method, 4] for method in ("mean", "best", "weighted", "oracle", "beam")} == {4 * NUM_STEPS * (1 + 3)}
