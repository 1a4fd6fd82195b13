"""What a command names, checked before any work: files of `conf`, and the pipelines, nodes and tags to run."""

import math
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from kedro.config import MissingConfigException, OmegaConfigLoader
from kedro.framework.session import KedroSession
from kedro.pipeline import Pipeline
from kedro.pipeline.pipeline import OutputNotUniqueError
from omegaconf.errors import OmegaConfBaseException

from ups.commands import FaultExit
from ups.errors import ConfigFault, nearest

if TYPE_CHECKING:
    from ups.runs.submission import Job

# Values that an entry of the catalog may have. A type is imported and called, and so are some arguments, such as
# `validator` and Matplotlib's `backend`: a catalog with others could run code.
DATASETS = ("JSON", "Records", "LatentCacheReceipt", "Text", "Markdown", "Pages")
TYPES = {*(f"ups.datasets.{name}" for name in DATASETS), "json.JSONDataset", "matplotlib.MatplotlibDataset"}
ARGUMENTS = {"type", "filepath", "data_root", "optional", "save_args", "metadata"}
SAVE_ARGUMENTS = {"dpi", "indent", "allow_nan"}
# Raised by Kedro on files that are no YAML or hold something else than sections; the last two on a list.
UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, MissingConfigException, ValueError, RecursionError)
UNREADABLE += (AttributeError, TypeError)
MAX_ALIASED_VALUES = 10_000  # in a file; Kedro takes a millisecond for three


class Session(KedroSession):
    """Kedro's session; a name on the command line that does not exist ends it in one line with the nearest one."""

    def run(self, **options: Any) -> dict[str, Any]:
        """Run what `kedro run` names."""
        from ups.pipeline_registry import register_pipelines

        try:
            check_names(register_pipelines(), options)
        except ConfigFault as fault:
            raise FaultExit(fault) from None
        return super().run(**options)


def read_families(configuration: Mapping[str, Any], project: Path) -> None:
    """Define the families of `families.yml`, and those that the data root knows.

    Raises:
        ConfigFault: a definition is wrong.
        StorageFault: the data root cannot be read.
    """
    from ups.config import families_of
    from ups.data.pdebench import FAMILIES
    from ups.files import storage_faults

    FAMILIES.define(*families_of(configuration["families"]))
    if isinstance(data_root := configuration["parameters"].get("data_root"), str):
        with storage_faults(project / data_root):
            FAMILIES.read(project / data_root)


def job_of(project: Path, env: str, pipeline: str, params: str) -> "Job":
    """The job of `kedro run` with these options in the folder of a project; all of them are checked.

    Raises:
        ConfigFault: a parameter, the pipeline or the environment is wrong, or the folder is no project.
    """
    # Every command imports this module, and this function alone needs all of these.
    from kedro.framework.cli.utils import split_string
    from omegaconf import OmegaConf

    from ups.config import LaunchConfig, SubmitConfig
    from ups.hooks import check_parameters, places
    from ups.pipeline_registry import register_pipelines
    from ups.runs.submission import Job
    from ups.settings import CONFIG_LOADER_ARGS

    if not (project / "conf" / "base").is_dir():
        raise ConfigFault(f"{project} has no conf/base: start this command in the folder of the project")
    given = split_string(None, None, params)
    try:
        runtime_params = OmegaConf.to_container(OmegaConf.from_dotlist(given))
    except UNREADABLE:
        remedy = "write lists of several items into conf/local/parameters.yml"
        raise ConfigFault(f"--params cannot be read as NAME=VALUE,NAME=VALUE; {remedy}") from None
    loader = ConfigLoader(str(project / "conf"), env, runtime_params=runtime_params, **CONFIG_LOADER_ARGS)
    read_families(loader, project)
    parameters = loader["parameters"]
    check_parameters(parameters)
    check_names(register_pipelines(), {"pipeline_names": [pipeline]})
    return Job(
        words=("kedro", "run", "--env", env, "--pipeline", pipeline),
        params=",".join(item for item in given if not item.startswith(("submit.", "data_root="))),
        project=project,
        data_root=places(parameters, project)["data_root"],
        submit=SubmitConfig.model_validate(parameters["submit"]),
        launch=LaunchConfig.model_validate(parameters["launch"]),
    )


def check_names(pipelines: dict[str, Pipeline], options: dict[str, Any]) -> None:
    """Check the names in the options of `kedro run`.

    Raises:
        ConfigFault: there is no such pipeline, it has no such node, dataset, tag or namespace, none is left to run, or
            two pipelines cannot run together.
    """
    chosen = options.get("pipeline_names") or ["__default__"]
    _expect(chosen, pipelines, "pipeline")
    nodes = [node for name in chosen for node in pipelines[name].nodes]
    datasets = {name for node in nodes for name in (*node.inputs, *node.outputs)}
    known = dict.fromkeys(("node_names", "from_nodes", "to_nodes"), {node.name for node in nodes})
    known |= {"from_inputs": datasets, "to_outputs": datasets, "tags": {tag for node in nodes for tag in node.tags}}
    known |= {"namespaces": {node.namespace for node in nodes if node.namespace}}
    for option, names in known.items():
        what = {"tags": "tag", "namespaces": "namespace"}.get(option, "dataset" if names is datasets else "node")
        _expect(options.get(option) or (), names, what)
    try:
        whole = sum((pipelines[name] for name in chosen), Pipeline([]))
    except OutputNotUniqueError:
        raise ConfigFault(f"{' and '.join(chosen)} write the same results: run one after the other") from None
    given = {option: options.get(option) for option in known}
    try:
        whole.filter(node_namespaces=given.pop("namespaces"), **given)
    except ValueError:
        raise ConfigFault("no node fits all of these options: see `kedro registry describe`") from None


def _expect(names: Iterable[str], known: Iterable[str], what: str) -> None:
    known = sorted(known)
    for name in names:
        if name not in known:
            raise ConfigFault(f"there is no {what} {name!r}{nearest(name, known)}")


class ConfigLoader(OmegaConfigLoader):
    """Kedro's loader; what it cannot read, and a catalog that `check_catalog` refuses, end the command in one line."""

    def __init__(self, conf_source: str, env: str | None = None, **options: Any) -> None:
        folder = Path(conf_source)
        chosen = env or options["default_run_env"]
        if folder.is_dir() and not (folder / chosen).is_dir():
            known = sorted(path.name for path in folder.iterdir() if path.is_dir())
            raise FaultExit(ConfigFault(f"{folder} has no environment {chosen!r}{nearest(chosen, known)}"))
        for path in chain.from_iterable(sorted((folder / name).rglob("*")) for name in (options["base_env"], chosen)):
            check_aliases(path)
        super().__init__(conf_source, env, **options)

    def __getitem__(self, key: str) -> dict[str, Any]:
        try:
            content = super().__getitem__(key)
        except MissingConfigException:
            if key == "families":
                return {}
            if key not in ("catalog", "parameters"):  # what else Kedro and its plugins ask for, they can do without
                raise
            raise FaultExit(ConfigFault(f"{self.conf_source}: has no {key}*.yml; restore conf/base")) from None
        except UNREADABLE as error:
            what = f"{self.conf_source}, {key}*.yml of {self.base_env} or {self.env or self.default_run_env}"
            why = "expected sections, not a list" if isinstance(error, AttributeError | TypeError) else error
            raise FaultExit(ConfigFault(f"{what}: {why}; correct the file")) from None
        if key == "catalog":
            try:
                check_catalog(content)
            except ConfigFault as fault:
                raise FaultExit(fault) from None
        return content


def check_aliases(path: Path) -> None:
    """Refuse a file in which few lines stand for many values, by aliases of aliases: reading it would never end."""
    if path.suffix not in (".yml", ".yaml", ".json") or not path.is_file() or b"*" not in (text := path.read_bytes()):
        return
    try:
        if _count_values(yaml.compose(text, Loader=yaml.SafeLoader), {}) > MAX_ALIASED_VALUES:
            what = f"its aliases stand for more than {MAX_ALIASED_VALUES} values"
            raise FaultExit(ConfigFault(f"{path}: {what}; write out what you need"))
    except UNREADABLE as error:
        raise FaultExit(ConfigFault(f"{path}: {error}; correct the file")) from None


def _count_values(node: yaml.Node | None, known: dict[int, float]) -> float:
    """Values of a node, those behind its aliases included; infinite for one that contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        nodes = node.value if isinstance(node, yaml.CollectionNode) else []
        nodes = chain.from_iterable(nodes) if isinstance(node, yaml.MappingNode) else nodes
        known[id(node)] = 1 + sum(_count_values(child, known) for child in nodes)
    return known[id(node)]


def check_catalog(catalog: dict[str, Any]) -> None:
    """Check that every entry is of a type of `conf/base` with its arguments, and a file of this machine.

    Raises:
        ConfigFault: an entry could run code, or would be read from or written to a network address.
    """
    for name, entry in catalog.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("filepath"), str):
            raise ConfigFault(f"catalog entry {name!r}: expected a section with type and filepath")
        if not isinstance(entry.get("type"), str) or entry["type"] not in TYPES:
            allowed = ", ".join(sorted(TYPES))
            raise ConfigFault(f"catalog entry {name!r}: type {entry.get('type')!r} is not allowed; allowed: {allowed}")
        unknown = [key for key in entry if key not in ARGUMENTS]
        save_args = entry.get("save_args", {})
        if not isinstance(save_args, dict):
            raise ConfigFault(f"catalog entry {name!r}: save_args is {save_args!r}, expected a section")
        unknown += [f"save_args.{key}" for key in save_args if key not in SAVE_ARGUMENTS]
        if unknown:
            raise ConfigFault(f"catalog entry {name!r}: remove {', '.join(map(repr, unknown))}, which is not allowed")
        for place in (entry["filepath"], entry.get("data_root", "")):
            if "://" in str(place) or "::" in str(place):
                raise ConfigFault(f"catalog entry {name!r}: {place!r} is a network address; name a local folder")
