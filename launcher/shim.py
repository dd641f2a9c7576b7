"""How does a worker process begin? ``python -m launcher.shim MODULE``, started by the agent and by nobody else.

Asks the kernel for SIGKILL when the agent's main thread ends, makes sure that the agent has not ended already, and
then runs MODULE as ``__main__`` in this same process. Needs nothing but the standard library, so that a worker whose
packages are broken still says so.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import os
import runpy
import signal
import sys

from rpcrl import env

__all__ = ["CANNOT_START", "START_FAILED", "main"]

START_FAILED = 127
"""Exit status of a worker whose module does not exist; as a shell's for an unknown command."""
CANNOT_START = "rpcrl cannot start this worker: "
"""Opens the line that says why; the agent looks for it."""

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run the module named by ``arguments``; return a status only when it cannot be run."""
    parent = env.get(env.PARENT_PID, "")
    bootstrap = env.get(env.BOOTSTRAP_FD, "")
    if len(arguments) != 1 or not parent or not parent.isdecimal():
        sys.stderr.write(f"{CANNOT_START}the agent runs this as `launcher.shim MODULE` with {env.PARENT_PID} set\n")
        return START_FAILED
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        # The agent died before the line above: nobody would ever end this process.
        return START_FAILED
    _close_inherited(keep=int(bootstrap) if bootstrap and bootstrap.isdecimal() else -1)
    faulthandler.enable()
    module = arguments[0]
    try:
        found = importlib.util.find_spec(module) is not None
        problem = f"no module named {module!r} on {sys.path}"
    except Exception as error:
        # A parent package that fails to import is the user's to see, whatever it raised.
        found, problem = False, f"{module!r} cannot be imported: {type(error).__name__}: {error}"
    if not found:
        sys.stderr.write(f"{CANNOT_START}{problem}\n")
        return START_FAILED
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _close_inherited(keep: int) -> None:
    """Close all descriptors but the standard ones and the bootstrap's, which is not handed on: it holds a key."""
    # Whoever started the agent may have left some open for it, e.g. sockets that must close when their owner ends.
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            if number == keep:
                os.set_inheritable(number, False)
            elif number > 2:
                os.close(number)
        except OSError:
            # The descriptor of the listing itself.
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
