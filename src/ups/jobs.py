"""A torchrun job that answers one question: what a worker module found out about a stage."""

from typing import Any

from ups.files import read_json, write_json
from ups.run import Run
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
    answer = run.folder / ANSWER
    answer.unlink(missing_ok=True)
    run.write()
    write_json(run.folder / QUESTION, question)
    ended = run_job(module, run.folder, run.launch, lambda: None)
    if not answer.is_file():
        raise fault_of(run.folder, run.launch.world_size, *ended)
    return read_json(answer)
