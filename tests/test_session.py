"""Names on the command line: those that exist pass, any other ends in one line with the nearest."""

from pathlib import Path
from typing import Any

import pytest

from ups.data.families import Families, Family
from ups.errors import MAX_NAMES, ConfigFault, most_similar, nearest
from ups.pipeline_registry import register_pipelines
from ups.session import check_names, job_of

PIPELINES = register_pipelines()
PROJECT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pipeline_names": ["training", "baselines"]},
        {"from_nodes": ["train_operator"], "to_nodes": ["judge"]},
        {"pipeline_names": ["data"], "node_names": ("download_pdebench",), "tags": ("data",)},
        {"to_outputs": ["verdict"], "from_inputs": ["codec_receipt"], "namespaces": ["evaluation"]},
    ],
)
def test_names_that_exist_pass(options: dict[str, Any]):
    """Pipelines, and nodes, datasets, tags and namespaces of those that were chosen."""
    check_names(PIPELINES, options)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"pipeline_names": ["trainign"]}, "there is no pipeline 'trainign', did you mean training?"),
        ({"from_nodes": ["train_operater"]}, "there is no node 'train_operater', did you mean train_operator?"),
        ({"node_names": ("trian_codec",)}, "there is no node 'trian_codec', did you mean train_codec?"),
        ({"to_nodes": ["juge"]}, "there is no node 'juge', did you mean judge?"),
        ({"to_outputs": ["metric"]}, "there is no dataset 'metric', did you mean metrics?"),
        ({"tags": ("operater",)}, "there is no tag 'operater', did you mean operator?"),
        ({"namespaces": ["trainin"]}, "there is no namespace 'trainin', did you mean training?"),
        ({"pipeline_names": ["data"], "from_nodes": ["judge"]}, "there is no node 'judge'; known: check_sizes, "),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(options: dict[str, Any], line: str):
    """One line says which name does not exist, and which one was probably meant, or which there are."""
    with pytest.raises(ConfigFault) as caught:
        check_names(PIPELINES, options)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"pipeline_names": ["full", "baselines"]},
            "full and baselines write the same results: run one",
        ),
        ({"from_nodes": ["evaluate"], "to_nodes": ["train_codec"]}, "no node fits all of these options"),
    ],
)
def test_what_cannot_run_is_one_line(options: dict[str, Any], line: str):
    """Two pipelines with one result, and options that leave no node."""
    with pytest.raises(ConfigFault, match=line):
        check_names(register_pipelines(), options)


def test_a_name_unlike_any_other_is_answered_with_those_that_are_known():
    """All of a few, the first of many, and "none" where there are none; never a suggestion that is not like it."""
    assert nearest("viscosity", ["nu", "beta"]) == "; known: nu, beta"
    assert nearest("viscosity", []) == "; known: none"
    assert nearest("x", (f"file_{i}" for i in range(500))).endswith(f", file_{MAX_NAMES - 1}, ...")
    assert most_similar("--beta", ["--dt"], 0.5) == "--dt" and most_similar("--beta", ["--dt"], 0.75) is None


def test_a_job_knows_the_families_of_its_data_root(families: Families, tmp_path: Path):
    """As `kedro run` does: equations that are defined in files of data are stored there by the first run."""
    with pytest.raises(ConfigFault, match="'wave_1d' is no family"):
        job_of(PROJECT, "smoke", "full", f"data_root={tmp_path},operator.history=[wave_1d]")
    families.define(Family("wave_1d", "u_tt = u_xx", ("u",), ("x",), "periodic", ()))
    families.write(tmp_path)
    families.pop("wave_1d")
    assert job_of(PROJECT, "smoke", "full", f"data_root={tmp_path},operator.history=[wave_1d]").data_root == tmp_path
