"""A worker that does what its bootstrap says: a JSON list of steps. Stands in for a role in tests of the launcher.

Steps: ``["print", text]``, ``["fill", bytes, width]``, ``["ignore_sigterm"]``, ``["grandchild", how]``,
``["exit", code]``, ``["raise", text]``, ``["segfault"]``, ``["kill_self", signal]``, ``["limit_memory"]``,
``["report"]``, ``["cuda"]``, ``["wait"]``.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys

SLEEPER = ["sleep", "600"]


def grandchild(how: str) -> int:
    """Start a process that outlives its parent: ``plain``, ``session`` (its own) or ``bare`` (no environment, too)."""
    started = subprocess.Popen(
        SLEEPER,
        start_new_session=how != "plain",
        env={"PATH": os.defpath, "RPCRL_TEST_SESSION": os.environ.get("RPCRL_TEST_SESSION", "")}
        if how == "bare"
        else None,
    )
    return started.pid


def report() -> None:
    """Print what the process was given, as one JSON line."""
    facts = {
        "main": __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals(),
        "fds": sorted(int(name) for name in os.listdir("/proc/self/fd")),
        "environment": dict(os.environ),
        "argv": sys.argv,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "group": os.getpgid(0),
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "stdin": os.readlink("/proc/self/fd/0"),
    }
    print("REPORT " + json.dumps(facts), flush=True)


def report_gpus() -> None:
    """Compute on every visible GPU and print their UUIDs, as one JSON line."""
    import torch

    indices = range(torch.cuda.device_count())
    sums = {index: float(torch.ones(8, device=f"cuda:{index}").sum()) for index in indices}
    seen = [str(torch.cuda.get_device_properties(index).uuid) for index in indices if sums[index] == 8.0]
    print("CUDA " + json.dumps(seen), flush=True)


def main() -> None:
    """Read the steps and do them."""
    with open(int(os.environ["RPCRL_BOOTSTRAP_FD"]), "rb") as file:
        steps = json.loads(file.read())["steps"]
    for step, *values in steps:
        if step == "print":
            print(values[0], flush=True)
        elif step == "fill":
            total, width = values
            line = b"x" * width + (b"\n" if width < total else b"")
            for _ in range(total // len(line)):
                sys.stdout.buffer.write(line)
            sys.stdout.flush()
        elif step == "ignore_sigterm":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif step == "grandchild":
            print(f"GRANDCHILD {grandchild(values[0])}", flush=True)
        elif step == "exit":
            os._exit(values[0])
        elif step == "raise":
            raise RuntimeError(values[0])
        elif step == "segfault":
            ctypes.string_at(0)
        elif step == "kill_self":
            os.kill(os.getpid(), getattr(signal, values[0]))
        elif step == "limit_memory":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
            bytearray(1 << 33)
        elif step == "report":
            report()
        elif step == "cuda":
            report_gpus()
        elif step == "wait":
            signal.pause()
        else:
            raise ValueError(step)


if __name__ == "__main__":
    main()
