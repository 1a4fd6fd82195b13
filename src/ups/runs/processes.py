"""End a child process when its parent ends; a module of its own, because a worker calls it before importing torch."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (Linux): a killed launcher leaves no worker training."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    # The parent may have ended before the request was made: then no signal would ever come.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != parent:
        os._exit(9)
