"""The command line `ups`: commands that need neither a Kedro run nor torch at their start.

Kedro would take a module `ups.cli` for further commands of `kedro`.
"""

import sys
from pathlib import Path
from typing import Any

import click

from ups.errors import DataFault, Fault


class FaultExit(click.ClickException):
    """Ends the command line with a fault's exit code and one line, `FAULT <code> <kind>: <what and remedy>`."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"FAULT {fault.exit_code} {fault.kind}: {' '.join(str(fault).split())}")
        self.exit_code = fault.exit_code

    def show(self, file: Any = None) -> None:
        click.echo(self.message, file=file or sys.stderr)


class Commands(click.Group):
    """A group of commands in which a fault ends with one line and its exit code."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except Fault as fault:
            raise FaultExit(fault) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Universal Physics Stack: neural surrogates of PDEs."""


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--family", metavar="NAME", help="Family of the file, if the file does not say it.")
@click.option("--env", metavar="NAME", default="local", help="Environment of conf with families.yml, besides base.")
def check(file: Path, family: str | None, env: str) -> None:
    """Say what is understood of FILE (HDF5, NetCDF, npz or zarr) and what it lacks."""
    from rich import box, get_console
    from rich.markup import escape
    from rich.table import Table

    from ups.data.inspection import inspect

    define_families(Path("conf"), env)
    found = inspect("examine", path=file.resolve(), family=family)
    shown = Table(box=box.SIMPLE_HEAD, show_header=False)
    for topic, words in found["facts"].items():
        shown.add_row(topic, escape(words))
    console = get_console()
    console.print(shown)
    for problem in found["problems"]:
        click.echo(f"- {problem}")
    if found["problems"]:
        raise DataFault(f"{file}: cannot be used yet, see the {len(found['problems'])} line(s) above")
    click.echo(f"complete: kedro run --params source=folder,raw_root={file.parent}")


def define_families(conf: Path, env: str) -> None:
    """Define the families of `families.yml` in the configuration of a project, if there is one."""
    if not list(conf.glob("*/families*.yml")):
        return
    from ups.config import families_of
    from ups.data.pdebench import FAMILIES
    from ups.hooks import ConfigLoader
    from ups.settings import CONFIG_LOADER_ARGS

    FAMILIES.define(*families_of(ConfigLoader(str(conf), env, **CONFIG_LOADER_ARGS)["families"]))
