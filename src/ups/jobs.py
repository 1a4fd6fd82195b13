"""A torchrun job that answers one question: what a worker module found out about a stage."""

from typing import Any

from ups.files import read_json, write_json
from ups.run import LOG, Run
from ups.status import fault_of
from ups.torchrun import run_job

QUESTION, ANSWER = "question.json", "answer.json"


def ask(module: str, run: Run, question: dict[str, Any]) -> Any:
    """Run `module` on the processes that `run` asks for; what its rank 0 wrote to `answer.json` in the run folder.

    The worker finds `question` in `question.json`.

    Raises:
        Fault: the job ended without an answer.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    answer, log = run.folder / ANSWER, run.folder / LOG
    answer.unlink(missing_ok=True)
    run.write()
    write_json(run.folder / QUESTION, question)
    log_start = log.stat().st_size if log.is_file() else 0
    returncode = run_job(module, run.folder, run.launch, lambda: None)
    if not answer.is_file():
        raise fault_of(run.folder, run.launch.world_size, returncode, log_start)
    return read_json(answer)
