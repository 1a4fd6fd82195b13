"""How a command ends: with the exit code and the line of what went wrong."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from kedro.config import MissingConfigException
from kedro.io import DataCatalog, DatasetError
from kedro.pipeline import Pipeline, node

from tests.training.jobs import launched
from ups.datasets import Records, Text
from ups.errors import DataFault, Fault, Preempted, StorageFault
from ups.files import write_json
from ups.hooks import FaultExit, TrackingHooks, check_inputs, data_parameters, texts_of
from ups.runs import tracking
from ups.runs.progress import stop_requested
from ups.session import ConfigLoader, read_families
from ups.settings import CONFIG_LOADER_ARGS

CONF = Path(__file__).parents[1] / "conf"


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    """An error as it arrives from a pipeline: raised, for the reason that Kedro has wrapped."""
    try:
        raise error from cause
    except type(error) as arrived:
        return arrived


def end(error: Exception, monkeypatch: pytest.MonkeyPatch) -> FaultExit:
    """How a command ends whose pipeline raised this error; its run is FAILED."""
    closed: list[str] = []
    monkeypatch.setattr(tracking, "close_run", closed.append)
    with pytest.raises(FaultExit) as caught:
        TrackingHooks().on_pipeline_error(error)
    assert closed == ["FAILED"]
    assert caught.value.__cause__ is error
    return caught.value


def test_a_fault_ends_in_its_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A fault that Kedro has wrapped ends the command with its own exit code, one line and no traceback."""
    ending = end(raised(DatasetError("cannot load"), DataFault("no such\nfolder")), monkeypatch)
    assert (ending.exit_code, ending.message) == (3, "FAULT 3 data: no such folder")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["/full/disk", None])
def test_a_full_disk_is_no_defect(name: str | None, monkeypatch: pytest.MonkeyPatch):
    """A disk that is full or closed ends the command with exit code 6, wherever it was written to."""
    full = OSError(errno.ENOSPC, "full", name)
    for error in (raised(full), raised(DatasetError("cannot save"), full)):
        ending = end(error, monkeypatch)
        assert ending.exit_code == 6
        assert ending.message.startswith(f"FAULT 6 storage: {name or 'a file'}: No space left on device; ")


@pytest.mark.parametrize(
    ("error", "told"),
    [(DataFault("gone"), (DataFault, "gone")), (KeyError("x"), (Fault, "KeyError: 'x' (test_hooks.py:"))],
)
def test_agents_learn_how_a_run_ends(
    error: Exception, told: tuple[type[Fault], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """With several nodes the fault that ends a command is announced to their agents, its end without one as well."""
    monkeypatch.setattr(tracking, "close_run", lambda _: None)
    hooks, closed = TrackingHooks(), []
    hooks._first_node = SimpleNamespace(close=closed.append)
    with pytest.raises(FaultExit):
        hooks.on_pipeline_error(raised(error))
    hooks._data_root = tmp_path
    hooks.after_pipeline_run(Pipeline([]), DataCatalog())
    assert type(closed[0]) is told[0] and told[1] in str(closed[0]) and closed[1] is None


def test_agents_that_cannot_be_told_hide_no_fault(monkeypatch: pytest.MonkeyPatch):
    """The command ends with the exit code of its own fault where the disk of the announcement is full."""

    def close(_: Fault) -> None:
        raise StorageFault("full")

    monkeypatch.setattr(tracking, "close_run", lambda _: None)
    hooks = TrackingHooks()
    hooks._first_node = SimpleNamespace(close=close)
    with pytest.raises(FaultExit) as ended:
        hooks.on_pipeline_error(raised(DataFault("gone")))
    assert ended.value.exit_code == DataFault.exit_code


def test_several_nodes_train_one_stage_at_a_time(tmp_path: Path):
    """Agents follow one job: runners that start several are refused before any work."""
    hooks = TrackingHooks()
    launch = launched(num_nodes=2, rendezvous="127.0.0.1:29500").model_dump()
    hooks._data_root, hooks._parameters = tmp_path, {"launch": launch}
    with pytest.raises(FaultExit, match="leave out --runner"):
        hooks.before_pipeline_run({"pipeline_names": None, "env": None, "runner": "ThreadRunner"})
    assert list(tmp_path.iterdir()) == []


def refuse(_: int) -> None:
    """Python's own error, which says nothing."""
    raise MemoryError


@pytest.mark.parametrize("allocate", [torch.empty, np.empty, refuse])
def test_memory_run_out_is_no_defect(allocate: Callable[[int], object], monkeypatch: pytest.MonkeyPatch):
    """An evaluation that gets no memory ends the command with exit code 5 and says which parameters to lower."""
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate(1 << 58)
    ending = end(caught.value, monkeypatch)
    assert ending.exit_code == 5
    assert ending.message.startswith("FAULT 5 out of memory: ")
    assert "lower `batch_tokens`" in ending.message


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("by\nzero"), FileNotFoundError(errno.ENOENT, "gone"), DatasetError("odd")]
)
def test_a_defect_ends_with_its_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """What nobody but us can have caused ends the command with exit code 70 and one line below the traceback."""
    ending = end(raised(error), monkeypatch)
    assert ending.exit_code == 70
    assert ending.message.startswith(f"FAULT 70 internal: {type(error).__name__}: ")
    assert "(test_hooks.py:" in ending.message and "\n" not in ending.message
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):")


def test_control_characters_never_reach_the_terminal():
    """The line of a fault shows the escape codes of a name instead of sending them."""
    line = FaultExit(DataFault("a\x1b]0;title\x07\u202eb \u00b5 \udc80")).message
    assert line == r"FAULT 3 data: a\x1b]0;title\x07\u202eb \u00b5 \udc80".replace(r"\u00b5", "\u00b5")


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A copy of `conf`."""
    return shutil.copytree(CONF, tmp_path / "conf")


def load(conf: Path, key: str = "catalog", env: str | None = None, **params: Any) -> dict[str, Any]:
    """A part of the configuration, as a command reads it."""
    return ConfigLoader(str(conf), env, runtime_params=params, **CONFIG_LOADER_ARGS)[key]


def refusal(conf: Path, **given: Any) -> str:
    """The one line, with exit code 2, in which the configuration is refused."""
    with pytest.raises(FaultExit) as caught:
        load(conf, **given)
    assert caught.value.exit_code == 2 and "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("env", ["base", "smoke", "sample", "pdebench", "accuracy", "conditions", "local"])
def test_the_catalog_we_ship_is_allowed(env: str):
    """Every environment's catalog passes its own check."""
    assert load(CONF, env=env)["latent_cache"]["type"] == "ups.datasets.LatentCacheReceipt"


GOOD: dict[str, Any] = {"type": "ups.datasets.JSON", "filepath": "x.json"}
HOSTILE = [
    GOOD | {"type": "pickle.PickleDataset"},
    GOOD | {"type": "kedro_datasets.pickle.PickleDataset"},
    GOOD | {"type": "{stage}.{kind}"},
    GOOD | {"type": "${runtime_params:kind}"},
    GOOD | {"type": ["ups.datasets.JSON"]},
    {"type": "partitions.PartitionedDataset", "path": "x", "dataset": "pickle.PickleDataset"},
    {"type": "kedro.io.CachedDataset", "filepath": "x", "dataset": {"type": "pickle.PickleDataset"}},
    GOOD | {"dataset": {"type": "pickle.PickleDataset"}},
    GOOD | {"validator": "os.system"},
    GOOD | {"versioned": True},
    GOOD | {"fs_args": {"open_args_load": {"mode": "rb"}}},
    GOOD | {"credentials": "mine"},
    {"type": "matplotlib.MatplotlibDataset", "filepath": "x", "save_args": {"backend": "module://evil"}},
    GOOD | {"save_args": "backend"},
    GOOD | {"filepath": "s3://bucket/x.json"},
    GOOD | {"filepath": "simplecache::file"},
    "pickle.PickleDataset",
]


@pytest.mark.parametrize("entry", HOSTILE, ids=str)
def test_catalog_entries_that_could_run_code_are_refused(conf: Path, entry: Any):
    """An entry has a type and arguments of ours, and a local file."""
    (conf / "local" / "catalog.yml").write_text(yaml.safe_dump({"codec_receipt": entry}))
    assert "catalog entry 'codec_receipt': " in refusal(conf, kind="pickle.PickleDataset")


@pytest.mark.parametrize("name", ["codec_receipt", "{stage}_receipt", "table@pickle", "new"])
@pytest.mark.parametrize("layer", ["base/catalog.yml", "local/catalog/deep/more.json", "smoke/catalog_more.yml"])
def test_catalogs_are_checked_in_every_layer(conf: Path, name: str, layer: str):
    """A forbidden type is found in any file of any environment, under a plain, transcoded, new or pattern's name."""
    (conf / layer).parent.mkdir(parents=True, exist_ok=True)
    (conf / layer).write_text(yaml.safe_dump({name: HOSTILE[0]}))
    line = refusal(conf, env="smoke" if layer.startswith("smoke") else None)
    assert f"catalog entry {name!r}: type 'pickle.PickleDataset' is not allowed" in line


def test_a_catalog_set_at_run_time_is_checked(conf: Path):
    """What a plug-in puts in place of the catalog is refused as a file's."""
    loader = ConfigLoader(str(conf), **CONFIG_LOADER_ARGS)
    loader["catalog"] = {"x": GOOD | {"type": "pickle.PickleDataset"}}
    with pytest.raises(FaultExit, match="'pickle.PickleDataset' is not allowed"):
        loader["catalog"]


def test_a_network_address_as_data_root_is_refused(conf: Path):
    """Results are files of this machine."""
    assert "network address" in refusal(conf, data_root="https://example.org/data")


@pytest.mark.parametrize(
    "text",
    [
        "codec:\n\tsteps: 3\n",
        "codec: {steps: 1, steps: 2}\n",
        "codec: {steps: 3\n",
        "- a\n- b\n",
        "seed: ${oc.env:NO_SUCH_VARIABLE}\n",
        "seed: ${evil:1}\n",
        "x: \x01\n",
        "x: !!python/object/apply:os.mkdir [MARKER]\n",
        "x: !!python/name:os.system\n",
    ],
)
@pytest.mark.parametrize("name", ["parameters", "catalog", "globals"])
def test_files_that_are_no_configuration_are_one_line(conf: Path, tmp_path: Path, name: str, text: str):
    """Broken YAML, a list, an unknown resolver and a Python object in any file end in one line and run nothing."""
    (conf / "local" / f"{name}.yml").write_text(text.replace("MARKER", str(tmp_path / "marker")))
    assert f"{name}*.yml of base or local" in refusal(conf, key=name)
    assert not (tmp_path / "marker").exists()


def test_plugins_may_ask_for_configuration_that_is_not_there(conf: Path):
    """A plugin, kedro-airflow for example, goes on by Kedro's own error where nobody has written its file."""
    patterns = {"config_patterns": {"airflow": ["airflow*"]}}
    loader = ConfigLoader(str(conf), "local", **(CONFIG_LOADER_ARGS | patterns))
    with pytest.raises(MissingConfigException):
        loader["airflow"]


def bomb(depth: int) -> str:
    """A list of ten lists of ten lists ..., by aliases."""
    lines = (f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, depth))
    return "\n".join(["_bomb:", "  a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]", *lines])


BOMBS = {"thousands": bomb(5), "billions": bomb(9), "itself": "_a: &a [*a]"}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("layer", ["base/parameters_data.yml", "local/parameters/a.yaml", "local/catalog.json"])
def test_aliases_of_aliases_are_one_line(conf: Path, layer: str, name: str):
    """A file whose few lines stand for more values than can be read is refused at once."""
    (conf / layer).parent.mkdir(exist_ok=True)
    (conf / layer).write_text(BOMBS[name])
    assert f"{conf / layer}: its aliases stand for more than 10000 values" in refusal(conf)


def test_a_damaged_file_with_aliases_is_one_line(conf: Path):
    """A file with aliases that is no YAML is refused as any other."""
    (conf / "local/parameters.yml").write_text("a: *a\nb: [")
    assert f"{conf}/local/parameters.yml: found undefined alias 'a'" in refusal(conf)


def test_unknown_environments_are_named(conf: Path):
    """A misspelt environment ends in one line with the known ones."""
    assert "has no environment 'smok', did you mean smoke?" in refusal(conf, env="smok")


def test_a_run_that_was_asked_to_stop_is_killed_and_not_failed(monkeypatch: pytest.MonkeyPatch):
    """It ends with exit code 75, and MLflow shows that nothing was wrong with it."""
    closed: list[str] = []
    monkeypatch.setattr(tracking, "close_run", closed.append)
    with pytest.raises(FaultExit) as caught:
        TrackingHooks().on_pipeline_error(raised(Preempted("stopped at step 3")))
    assert closed == ["KILLED"] and caught.value.exit_code == 75


def test_no_step_begins_after_another_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With nodes in threads Kedro would still begin those that it has submitted; a new run in this process begins."""
    monkeypatch.setattr(tracking, "open_run", lambda *_: None)
    monkeypatch.setattr("ups.hooks.atexit.register", lambda *_: None)
    monkeypatch.setattr("ups.hooks.signal.signal", lambda *_: None)
    hooks = TrackingHooks()
    hooks._data_root, hooks._parameters = tmp_path, dict(load(CONF, "parameters"))
    hooks.before_node_run()
    try:
        hooks.on_node_error()
        with pytest.raises(Preempted, match="interrupted"):
            hooks.before_node_run()
        hooks.before_pipeline_run({"pipeline_names": None, "env": None, "runner": "ThreadRunner"})
        hooks.before_node_run()
    finally:
        stop_requested.clear()


def test_the_data_of_a_run_are_tracked_without_secrets():
    """Of the source that is read the section is tracked, by dotted names; a password in an address is not."""
    parameters = dict(load(CONF, "parameters", source="pdebench")) | {"source": "pdebench"}
    parameters["download"] = parameters["download"] | {"base_url": "https://me:secret@host/data"}
    tracked = data_parameters(parameters)
    assert tracked["source"] == "pdebench" and tracked["subsample.default.every_point"] == "1"
    assert [name for name in tracked if name.startswith("simulate")] == ["simulate.fill_below", "simulate.fill_to"]
    assert "secret" not in " ".join(tracked.values()) and "download.base_url" in tracked


def test_a_run_says_which_texts_it_has_written(tmp_path: Path):
    """Markdown and HTML that no node reads are named; figures, records and what another node reads are not."""
    texts = {name: Text(filepath=str(tmp_path / f"{name}.md")) for name in ("draft", "final")}
    catalog = DataCatalog(texts | {"scores": Records(filepath=str(tmp_path / "scores.json"))})
    steps = [node(lambda: 1, None, ["draft", "scores"], name="first"), node(len, "draft", "final", name="last")]
    assert texts_of(Pipeline(steps), catalog) == [tmp_path / "final.md"]


def test_a_data_root_that_cannot_be_looked_at_is_one_line(tmp_path: Path):
    """Before any step, in `kedro run` and `ups launch`."""
    configuration = {"families": {}, "parameters": {"data_root": 300 * "a"}}
    with pytest.raises(StorageFault, match="File name too long; choose another name"):
        read_families(configuration, tmp_path)


def test_runs_to_compare_with_are_looked_up_first(tmp_path: Path):
    """A data root without scores is refused before any work, not by the report at the end of it."""
    write_json(tmp_path / "08_reporting" / "metrics.json", [])
    check_inputs(None, [str(tmp_path)])
    with pytest.raises(DataFault, match=r"missing/08_reporting/metrics.json does not exist: .*report.compare"):
        check_inputs(None, [str(tmp_path), str(tmp_path / "missing")])
