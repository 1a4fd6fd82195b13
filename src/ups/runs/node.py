"""torchrun on one of several nodes: `python -m ups.runs.node MODULE RUN_DIR JOB host`, on all but the first `join`.

torchrun's store takes pickled objects from whoever reaches its port and listens on all addresses. Here it listens on
the address of `launch.rendezvous` alone, and gloo and NCCL on the interface that leads there.
"""

import errno
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

import psutil
from torch.distributed import TCPStore
from torch.distributed import run as torchrun

from ups.errors import ConfigFault
from ups.runs.run import Run
from ups.runs.torchrun import HOST, environment, torchrun_arguments

ELSEWHERE = (errno.EADDRNOTAVAIL, errno.EADDRINUSE)


def main(module: str, folder: Path, job: str, role: str) -> None:
    """Run `module` on this node's processes of the job in `folder`; returns when all of them have ended."""
    run = Run.read(folder)
    launch = run.launch
    assert launch.rendezvous is not None
    host, _, port = launch.rendezvous.rpartition(":")
    family, _, _, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # finds this node's address on that network, sends nothing
        probe.connect(place)
        own_address = probe.getsockname()[0]
    interfaces = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} - set(launch.nccl)
    own_choice = {name: os.environ[name] for name in interfaces if name in os.environ}
    os.environ.update(environment(launch, run.data_root, _interface_of(own_address)) | own_choice)
    # Closed when this process ends.
    store = _hosted_store(family, place, launch.timeout_seconds) if role == HOST else None  # noqa: F841
    torchrun.main(
        [
            *(f"--nnodes={launch.num_nodes}", f"--rdzv-endpoint={launch.rendezvous}", f"--local-addr={own_address}"),
            f"--rdzv-id={job}",
            f"--rdzv-conf=is_host=0,join_timeout={launch.timeout_seconds}",
            *torchrun_arguments(module, folder, launch),
        ]
    )


def _interface_of(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if address in (entry.address for entry in addresses):
            return name
    raise ConfigFault(f"no network interface of this node has the address {address}; is launch.rendezvous right?")


def _hosted_store(family: int, place: tuple, timeout_seconds: int) -> TCPStore | None:
    """The store of the job's torchruns; None if somebody else has the address or port of the rendezvous."""
    try:
        listener = socket.create_server(place, family=family)
    except OSError as error:
        if error.errno not in ELSEWHERE:
            raise
        return None
    timeout = timedelta(seconds=timeout_seconds)
    options = {"is_master": True, "timeout": timeout, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return TCPStore(*place[:2], **options)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
