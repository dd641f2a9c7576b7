"""Does Ctrl-C wait while a large library is imported, and only then?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rpcrl.runtime.loading import loading

ROOT = Path(__file__).resolve().parents[3]


def _run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_signal_is_held_until_the_end_and_its_handler_is_there_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    done = []

    def load() -> None:
        with loading():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest of the import")

    with pytest.raises(KeyboardInterrupt):
        load()
    assert done == ["the rest of the import"]
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_error_of_the_import_comes_through_without_a_signal() -> None:
    with pytest.raises(ImportError, match="no such part"), loading():
        raise ImportError("no such part")


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with loading():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_change_no_handlers() -> None:
    errors: list[BaseException] = []

    def load() -> None:
        try:
            with loading():
                pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join(10.0)
    assert not errors


def test_the_second_signal_ends_the_process_at_once() -> None:
    done = _run(
        "import signal\nfrom rpcrl.runtime.loading import loading\n"
        "with loading():\n"
        "    signal.raise_signal(signal.SIGINT)\n    print('held', flush=True)\n"
        "    signal.raise_signal(signal.SIGINT)\n    print('not reached', flush=True)\n"
    )
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "held\n")


def test_p25_ctrl_c_in_the_middle_of_importing_torch_leaves_a_whole_torch() -> None:
    """Without ``loading`` the exception comes out of the import, aborts in compiled code, or is lost."""
    done = _run(
        """
import os, signal, sys, threading
from rpcrl.runtime.loading import loading

def press_ctrl_c():
    while "torch.nn" not in sys.modules:
        os.sched_yield()
    os.kill(os.getpid(), signal.SIGINT)

pressing = threading.Thread(target=press_ctrl_c, daemon=True)
pressing.start()
try:
    with loading():
        import torch
        pressing.join(30.0)
        print("imported", flush=True)
except KeyboardInterrupt:
    print("interrupted after it", float(torch.nn.Linear(1, 1).weight.detach().mul(0).sum()), flush=True)
    sys.exit(130)
"""
    )
    assert (done.returncode, done.stdout) == (130, "imported\ninterrupted after it 0.0\n"), done.stderr
