"""The command `ups`: predictions and scores of files, descriptions and exports of trained models.

It starts without torch, which a command imports when it needs it. Kedro would take a module `ups.cli` for further
commands of `kedro`.
"""

import logging
import signal
import sys
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from shlex import quote
from typing import Any

import click

from ups.errors import ConfigFault, DataFault, Fault, Preempted, most_similar
from ups.files import storage_faults

OPTION_SIMILARITY = 0.75  # of an unknown option that is a misspelt one, and no parameter of a PDE
FILE = click.Path(path_type=Path)
FORMATS = ["bundle", "pt2", "onnx", "aoti"]


class FaultExit(click.ClickException):
    """Ends the command line with a fault's exit code and line."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.line)
        self.exit_code = fault.exit_code

    def show(self, file: Any = None) -> None:
        click.echo(self.message, file=file or sys.stderr)


class Commands(click.Group):
    """A group of commands in which a fault, or a wrong option, ends with one line and its exit code."""

    def invoke(self, context: click.Context) -> Any:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("ups").setLevel(logging.INFO)  # other libraries warn only
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # without the place in the code
        try:
            with storage_faults():
                return super().invoke(context)
        except Fault as fault:
            raise FaultExit(fault) from None
        except click.UsageError as error:
            what = error.format_message().rstrip(".")
            raise FaultExit(ConfigFault(f"{what}; `ups --help` shows the commands and their options")) from None
        except KeyboardInterrupt:
            raise FaultExit(Preempted("interrupted; the same command goes on")) from None


class WithParameters(click.Command):
    """A command that takes parameters of a PDE as further options, `--nu 0.01` or `--nu=0.01`, at any place.

    They are in `click.Context.args`: names and values by turns.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = {name for option in self.get_params(ctx) for name in option.opts}
        own, parameters, words = [], [], iter(args)
        for word in words:
            name, equals, value = word.partition("=")
            if name.startswith("--") and name not in options:
                parameters += [name, value if equals else next(words, "")]
            else:
                own.append(word)
        super().parse_args(ctx, own)
        ctx.args = parameters
        return parameters


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ups")
def main() -> None:
    """Universal Physics Stack: trained surrogates of PDEs."""


@main.command(cls=WithParameters)
@click.argument("source", metavar="IN", type=FILE)
@click.argument("target", metavar="OUT", type=FILE)
@click.option("--model", "place", default="data", show_default=True, help="Data root or bundle with the models.")
@click.option("--family", required=True, help="For example burgers_1d; `ups info` lists them.")
@click.option("--steps", type=int, help="Time steps; not for steady families.")
@click.option("--start", type=int, default=0, show_default=True, help="Index of the initial snapshot; -1 is the last.")
@click.option("--members", type=int, help="Size of an ensemble, even.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the ensemble's noise.")
@click.option("--dt", type=float, help="Time between snapshots, a multiple of the trained one, which is the default.")
@click.option("--device", help="cpu or cuda; by default a GPU if there is one.")
@click.pass_context
def predict(context: click.Context, source: Path, target: Path, place: str, device: str | None, **asked: Any) -> None:
    """Predict from all initial states in the file IN, and write the trajectories to OUT.

    Parameters of the PDE are further options, `--nu 0.01`, and override those that IN states.

    IN is npz, npy, zarr, HDF5 or NetCDF: an array (N, *grid) per field, or a single one (N, C, *grid). Of trajectories
    (N, T, *grid) the snapshot `--start` is taken, and the one before it too where steps start from two. Coefficient
    fields and parameters are arrays of their names. OUT is zarr, NetCDF or npz with an array per field, or HDF5 in
    PDEBench's layout. The same command goes on where a killed one has ended.
    """
    parameters = _parameters(context.args)
    import ups
    from ups.runs.progress import ProgressBar
    from ups.surrogate.files import Job, Request

    model = ups.load(place, device=device)
    _expect_parameters(parameters, {name for card in model.cards.values() for name in card.family.parameters})
    job = Job.of(model, source, target, Request(**asked, parameters=parameters))
    with ProgressBar("predict", job.total, "snapshots") as bar:
        job.run(bar.advance)
    click.echo(target)


def _parameters(given: list[str]) -> dict[str, float]:
    """The parameters of the PDE, of names and values by turns."""
    parameters = {}
    for name, value in zip(given[::2], given[1::2], strict=True):
        try:
            parameters[name[2:]] = float(value)
        except ValueError:
            near = most_similar(name, [option.opts[0] for option in predict.params], OPTION_SIMILARITY)
            hint = f"did you mean {near}?" if near else "parameters of the PDE are given as `--nu 0.01`"
            raise ConfigFault(f"{name} is {value!r}, not a number: {hint}") from None
    return parameters


def _expect_parameters(given: Iterable[str], known: Collection[str]) -> None:
    """Refuse what is no parameter of a family, but nearly an option: a misspelt one."""
    for name in given:
        near = most_similar(f"--{name}", [option.opts[0] for option in predict.params], OPTION_SIMILARITY)
        if name not in known and near is not None:
            raise ConfigFault(f"there is no option --{name}: did you mean {near}?")


@main.command()
@click.argument("place", default="data", type=FILE)
@click.argument("family", required=False)
def info(place: Path, family: str | None) -> None:
    """Show the families of the models in the data root or bundle PLACE, or fields, parameters and scores of FAMILY."""
    import ups

    model = ups.load(place, device="cpu")
    if family is not None:
        click.echo(repr(model.describe(family)))
        return
    width = max(map(len, model.families))
    for name in model.families:
        click.echo(f"{name:{width}}  {model.describe(name).equation}")


@main.command()
@click.argument("place", type=FILE)
@click.argument("target", metavar="OUT", type=FILE)
@click.option("--format", "form", type=click.Choice(FORMATS), default="bundle", show_default=True)
@click.option("--family", help="Of which the model is written, in every format but bundle.")
@click.option("--dt", type=float, help="Time step of that model, a multiple of the trained one, which is the default.")
def export(place: Path, target: Path, form: str, family: str | None, dt: float | None) -> None:
    """Write the models of the data root or bundle PLACE to OUT.

    A bundle is a folder with the models of all families, for `ups.load`. The other formats are one file with the model
    of one family, which runs without this package: a program of torch, an ONNX graph, or machine code by AOTInductor.
    """
    import ups

    model = ups.load(place, device="cpu")
    given = [name for name, value in (("--family", family), ("--dt", dt)) if value is not None]
    if form == "bundle" and given:
        what = f"leave out {' and '.join(given)}, or choose another --format"
        raise ConfigFault(f"a bundle holds the models of all families: {what}")
    if form == "bundle":
        model.save(target)
    elif family is None:
        raise ConfigFault(f"--family is missing: {form} holds the model of one family")
    else:
        model.export(family, target, form, dt=dt)
    click.echo(target)


@main.command()
@click.argument("file", type=FILE)
@click.option("--family", metavar="NAME", help="Family of the file, if the file does not say it.")
@click.option("--env", metavar="NAME", default="local", help="Environment of conf with families.yml, besides base.")
def check(file: Path, family: str | None, env: str) -> None:
    """Say what is understood of FILE (HDF5, NetCDF, npz or zarr) and what it lacks."""
    from rich import box, get_console
    from rich.markup import escape
    from rich.table import Table

    from ups.data.inspection import inspect

    define_families(Path("conf"), env)
    found = inspect("examine", path=file.absolute(), family=family)
    shown = Table(box=box.SIMPLE_HEAD, show_header=False)
    for topic, words in found["facts"].items():
        shown.add_row(topic, escape(words))
    console = get_console()
    console.print(shown)
    for problem in found["problems"]:
        click.echo(f"- {problem}")
    if found["problems"]:
        raise DataFault(f"{file}: cannot be used yet, see the {len(found['problems'])} line(s) above")
    if "," in str(file.parent):
        raise ConfigFault(f"{file.parent}: rename the folder, because `kedro run --params` separates values at commas")
    chosen = "" if env == "local" else f" --env {quote(env)}"
    click.echo(f"complete: kedro run{chosen} --params {quote(f'source=folder,raw_root={file.parent}')}")


def define_families(conf: Path, env: str) -> None:
    """Define the families of `families.yml` in the configuration of a project, if there is one."""
    if not list(conf.glob("*/families*.yml")):
        return
    from ups.config import families_of
    from ups.data.pdebench import FAMILIES
    from ups.session import ConfigLoader
    from ups.settings import CONFIG_LOADER_ARGS

    FAMILIES.define(*families_of(ConfigLoader(str(conf), env, **CONFIG_LOADER_ARGS)["families"]))


@main.command()
@click.option("--data-root", "root", type=FILE, required=True, help="That of the run, on a disk that all nodes share.")
@click.option("--wait", "minutes", type=click.FloatRange(min=0), default=60, show_default=True, help="Minutes.")
def agent(root: Path, minutes: float) -> None:
    """Take part in a `kedro run` with launch.num_nodes > 1 that is started on another node, until it ends.

    --wait limits how long there may be no run, before it is started or after it was interrupted. This command ends with
    the run, with its exit code; killed, it can be started again at any time.
    """
    from ups.runs.agent import Agent

    Agent(root, minutes).serve()


@main.command()
@click.argument("predictions", type=FILE)
@click.option("--dataset", "truth", type=FILE, required=True, help="PDEBench file with the true trajectories.")
@click.option("--family", help="Of the dataset; by default found by its name.")
@click.option("--method", help="Name of the model; by default that of the file of predictions.")
@click.option("--test-split-of", type=FILE, help="Data root whose test split of FILE was predicted, in its order.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the confidence intervals.")
@click.option("--device", help="cpu or cuda; by default a GPU if there is one.")
@click.option("--output", type=FILE, help="JSON file for the scores, which `leaderboard.scores` takes.")
@click.option("--env", metavar="NAME", default="local", help="Environment of conf with families.yml, besides base.")
def score(predictions: Path, truth: Path, output: Path | None, device: str | None, env: str, **asked: Any) -> None:
    """Score the rollouts in the file PREDICTIONS, of whatever model, by the metrics of the evaluation.

    PREDICTIONS is zarr, HDF5, NetCDF, npz or npy and has the shapes of the dataset: an array (N, T, *grid) per field, a
    single one (N, T, C, *grid), or PDEBench's layout; of ensembles an array (N, M, T, *grid) per field. The first
    snapshot of each trajectory is the initial state and is not scored. N are all trajectories of FILE, with
    `--test-split-of` those of the test split. Rollouts that the evaluation has kept get its records to the last digit.
    """
    from rich import get_console

    from ups.evaluation.external import score_predictions
    from ups.evaluation.predictions import Compute
    from ups.evaluation.tables import rollout_table
    from ups.files import write_json

    define_families(Path("conf"), env)
    scores = score_predictions(predictions, truth, compute=Compute.on(device), **asked)
    get_console().print(rollout_table(scores["records"]))
    if output is not None:
        write_json(output, scores)


@main.command()
@click.option("--on", "target", required=True, help="slurm, sky, dstack, k8s or trainjob.")
@click.option("--dry-run", is_flag=True, help="Show the script or task file, and submit nothing.")
@click.option("--env", metavar="NAME", default="local", help="Environment of conf, as for `kedro run`.")
@click.option("--pipeline", default="__default__", help="As for `kedro run`.")
@click.option("--params", default="", help="As for `kedro run`; submit.NAME=VALUE is what the job needs.")
def launch(target: str, dry_run: bool, env: str, pipeline: str, params: str) -> None:
    """Submit a `kedro run` as a job to a cluster or cloud.

    Section `submit` of the parameters says what the job needs, `launch.num_processes` how many GPUs on each node.
    """
    from ups.runs.submission import CATALOGS, TARGETS, hourly_price
    from ups.session import job_of

    job = job_of(Path.cwd(), env, pipeline, params)
    if not dry_run:
        job.submit_to(target)
        return
    click.echo(job.render(target), nl=False)
    if target in ("sky", "dstack"):
        price = hourly_price(job.submit, job.launch, CATALOGS) if target == "sky" else None
        if price is None:
            asks = " ".join(TARGETS[target].command)
            shown = f"not known on this disk; `{asks}` shows it before it asks whether to start"
        else:
            shown = f"from {price:.2f} US dollars per hour, by SkyPilot's catalogs on this disk"
        click.echo(f"price: {shown}", err=True)


if __name__ == "__main__":
    main()
