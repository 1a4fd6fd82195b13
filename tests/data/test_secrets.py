"""Secrets in addresses and in the environment reach no line and no file of a run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).parents[2]
SENTINEL = "sentinel-5d1f"


@pytest.fixture
def run(tmp_path: Path):
    """`run(*options, **parameters)` downloads with `kedro run`: exit code, last line, and all that was written."""

    def start(*options: str, **parameters: dict) -> tuple[int, str, str]:
        conf = shutil.copytree(PROJECT / "conf", tmp_path / "conf")
        (conf / "local" / "parameters.yml").write_text(yaml.safe_dump(parameters))
        command = [sys.executable, "-m", "kedro", "run", "--pipeline", "data", "--conf-source", str(conf), *options]
        environment = os.environ | {"DO_NOT_TRACK": "true", "UPS_SECRET": SENTINEL, "COLUMNS": "500"}
        environment.pop("MLFLOW_TRACKING_URI", None)
        command += ["--params", f"data_root={tmp_path / 'data'}"]
        ended = subprocess.run(
            command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        written = [path.read_bytes().decode(errors="replace") for path in tmp_path.glob("data/**/*") if path.is_file()]
        return ended.returncode, ended.stderr.strip(), ended.stdout + ended.stderr + "".join(written)

    return start


WRONG = {
    "user of a mirror": {"download": {"base_url": f"https://me:{SENTINEL}@mirror.test/"}},
    "user of a mirror from the environment": {"download": {"base_url": "https://me:${oc.env:UPS_SECRET}@mirror.test/"}},
    "mirror from the environment": {"download": {"base_url": ["${oc.env:UPS_SECRET}"]}},
    "number from the environment": {"operator": {"steps": "${oc.env:UPS_SECRET}"}},
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_parameters_are_refused_without_their_secret(run, case: str):
    """A secret in a parameter that is refused ends in one line of exit code 2 that does not have it."""
    code, line, everything = run(**WRONG[case])
    assert code == 2 and line.startswith("FAULT 2 config: ") and "\n" not in line
    assert SENTINEL not in everything


def test_the_signature_of_a_redirect_is_not_told(run, serve, tmp_path: Path):
    """What a server puts into a redirect for the next server is neither logged nor tracked."""
    server = serve(tmp_path)

    def redirect(handler) -> None:
        handler.send_response(303)
        handler.send_header("Location", f"https://a.test/key?X-Amz-Signature={SENTINEL}")
        handler.end_headers()

    server.script[:] = [redirect] * 10
    download = {"families": [], "files": ["2D_DarcyFlow_beta0.1_Train.hdf5"], "base_url": server.url}
    code, line, everything = run(source="pdebench", download=download)
    assert code == 3, line
    assert "leads to a foreign host, https://a.test/key; check the URL" in line
    assert "\n" not in line and SENTINEL not in everything
