"""How long training steps of several stages take: measured once, in turns on this machine."""

from pathlib import Path
from typing import Any

from ups.config import AblationConfig, BaselinesConfig, LaunchConfig
from ups.fingerprint import fingerprint
from ups.jobs import ask
from ups.launch import device
from ups.receipts import Receipt, once
from ups.run import Run

WORKER = "ups.training.pace"


def seconds_per_step(
    step: str,
    stages: dict[str, dict[str, Any]],
    config: AblationConfig | BaselinesConfig,
    launch: LaunchConfig,
    data_root: Path,
    raw: Path | None = None,
) -> Receipt:
    """The receipt of step `step` with {"seconds_per_step": {name: value}}; see `ups.training.pace` for `stages`."""
    question = {"seconds": config.pace_seconds, "rounds": config.pace_rounds, "stages": stages}
    how = launch.model_dump(include={"num_processes", "num_nodes", "threads_per_process", "device", "compile"})
    identity = fingerprint(WORKER, None, question | {"launch": how})

    def measure(folder: Path) -> dict[str, Any]:
        first = next(iter(stages.values()))
        run = Run(
            folder,
            first["stage"],
            identity,
            first["config"],
            first["inputs"],
            launch,
            device(launch),
            data_root,
            raw,
        )
        return {"seconds_per_step": ask(WORKER, run, question)}

    return once(step, data_root / "06_models" / "pace", identity, measure, root=data_root)
