"""The command `ups`: predictions and scores of files, descriptions and exports of trained models.

It starts without torch, which a command imports when it needs it.
"""

import difflib
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import click

from ups.errors import ConfigFault, Fault, Preempted

FILE = click.Path(path_type=Path)
ANY_OPTION = {"ignore_unknown_options": True, "allow_extra_args": True}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ups")
def commands() -> None:
    """Universal Physics Stack: trained surrogates of PDEs."""


def main(arguments: list[str] | None = None) -> None:
    """Run one command; what a person or a file does wrong ends it with one line and the exit code of the fault."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    given = sys.argv[1:] if arguments is None else arguments
    try:
        commands(given or ["--help"], prog_name="ups", standalone_mode=False)
    except click.ClickException as error:
        _end(ConfigFault(f"{error.format_message()}; `ups --help` shows the commands and their options"))
    except click.Abort:
        _end(Preempted("interrupted; the same command goes on"))
    except Fault as fault:
        _end(fault)


def _end(fault: Fault) -> None:
    click.echo(fault.line, err=True)
    sys.exit(fault.exit_code)


if __name__ == "__main__":
    main()
