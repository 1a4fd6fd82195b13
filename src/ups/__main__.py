"""`python -m ups`: `kedro run` without the repository, with the configuration of the package.

A folder with a configuration of its own, `conf/base`, uses that one. `data_root` starts at the present folder.
"""

import os
import sys
from pathlib import Path

PACKAGED = Path(__file__).parent / "conf"


def main() -> None:
    """Run a pipeline; arguments are those of `kedro run`."""
    arguments = sys.argv[1:]
    if not Path("conf/base").is_dir():
        os.environ.setdefault("KEDRO_LOGGING_CONFIG", str(PACKAGED / "logging.yml"))  # Kedro reads it when imported
        if not any(argument.partition("=")[0] == "--conf-source" for argument in arguments):
            arguments = ["--conf-source", str(PACKAGED), *arguments]

    from kedro.framework.cli.project import run
    from kedro.framework.project import configure_project

    configure_project("ups")
    run.main(arguments, prog_name="python -m ups")


if __name__ == "__main__":
    main()
