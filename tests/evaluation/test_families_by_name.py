"""Families are known by name: the position of an entry in the table means nothing."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation.test_external import CORRECTOR, config, stages
from tests.training.jobs import launched
from tests.untrained import receipt
from ups.data.families import NUM_CONDITIONS, Family
from ups.data.pdebench import FAMILIES
from ups.errors import DataFault
from ups.models.sizes import Domain
from ups.pipelines.evaluation import score_test_split
from ups.surrogate.trained import Trained

OTHER = Family("waves_1d", "u_tt = beta^2 u_xx", ("u",), ("x",), "periodic", ("beta",), file_pattern=r"Wave_.*")


def scores(root: Path, folder: Path) -> list[dict[str, Any]]:
    """The records of all methods on the test split."""
    folder.mkdir()
    trained = Trained(receipt(root, "latent_cache"), stages(root) | {"corrector": CORRECTOR}, root)
    return score_test_split(folder, trained, config(None), launched(num_processes=1), root / "01_raw")["records"]


@pytest.fixture
def table() -> Iterator[dict[str, Family]]:
    """The table of families, free to be changed."""
    before = dict(FAMILIES)
    yield FAMILIES
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.mark.parametrize("position", [0, 5, 11])
def test_scores_do_not_depend_on_the_order_of_the_table(
    trained: Path, tmp_path: Path, table: dict[str, Family], position: int
):
    """With a further entry placed first, in the middle or last, a trained model has the same scores to the last bit."""
    expected = scores(trained, tmp_path / "before")
    entries = [*table.items()]
    entries.insert(position, (OTHER.name, OTHER))
    table.clear()
    table.update(entries)
    assert list(FAMILIES).index(OTHER.name) == position
    assert scores(trained, tmp_path / "after") == expected


def test_a_family_that_a_model_does_not_know_is_refused(trained: Path):
    """Weights were trained for families by name; for another one there is one line with the names."""
    models = Trained(receipt(trained, "latent_cache"), stages(trained), trained).surrogate("cpu")
    domain, z = Domain("burgers_1d", (8,), (True,)), torch.zeros(1, 8, 2)
    with pytest.raises(DataFault, match=r"^the model was not trained on 'burgers_1d', only on advection_1d, .*$"):
        models.operator(z, z[..., :0], torch.zeros(1, NUM_CONDITIONS), domain)


def test_what_is_only_shown_of_a_family_does_not_make_models_stale():
    """The digest of an entry covers what is read and learned, not the words on data cards."""
    family = FAMILIES["burgers_1d"]
    assert replace(family, equation="another way to write it").digest == family.digest
    assert replace(family, boundary="outflow").digest != family.digest
