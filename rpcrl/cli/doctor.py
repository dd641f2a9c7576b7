"""Can rpcrl run on this machine, and is anything left over from runs that died? ``rpcrl doctor`` looks and tells."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import click

from rpcrl.cli.finding import Finding

__all__ = ["Finding", "doctor"]

EXIT_FAILED = 1
MIN_SHM_BYTES = 256 * 2**20
MIN_OPEN_FILES = 1024
SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux."""


@click.command()
@click.option(
    "--clean", is_flag=True, help="End the processes and remove the directories of runs whose driver is dead."
)
@click.option("--vllm", is_flag=True, help="Start vLLM on the shipped model and sample with it (about 10 s).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list of findings.")
@click.pass_context
def doctor(context: click.Context, /, *, clean: bool, vllm: bool, as_json: bool) -> None:
    """Check versions, devices, memory and ports; find leftovers of dead runs, and tell what listens where."""
    findings = list(examine(clean=clean, vllm=vllm))
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            click.echo(f"{finding.status:<5} {finding.what:<22} {finding.text}")
            if finding.remedy:
                click.echo(f"{'':<28} fix: {finding.remedy}")
    if any(finding.status == "fail" for finding in findings):
        context.exit(EXIT_FAILED)


def examine(*, clean: bool = False, vllm: bool = False) -> Iterator[Finding]:
    """Yield every finding; a check that itself fails is a finding too."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _torch,
        _zeromq,
        _devices,
        _limits,
        _shared_memory,
        _sockets,
        _ports,
        lambda: _runs(clean=clean),
        *((_vllm,) if vllm else ()),
    )
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Finding("fail", "a check", f"could not be made: {type(error).__name__}: {error}")


def _python() -> Iterator[Finding]:
    from rpcrl.version import __version__

    version = platform.python_version()
    status = "ok" if sys.version_info >= (3, 11) else "fail"
    yield Finding(status, "rpcrl and Python", f"rpcrl {__version__}, Python {version} at {sys.executable}")
    yield Finding("ok", "machine", f"{platform.system()} {platform.release()}, {os.cpu_count()} CPUs")


def _torch() -> Iterator[Finding]:
    from importlib import metadata

    for package in ("torch", "transformers", "tensordict", "safetensors"):
        try:
            yield Finding("ok", package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Finding("fail", package, "is not installed", f"pip install {package}")


def _vllm() -> Iterator[Finding]:
    from rpcrl.cli.doctor_vllm import examine_vllm

    yield from examine_vllm()


def _zeromq() -> Iterator[Finding]:
    from rpcrl.transport.about import zeromq_facts

    facts = zeromq_facts()
    text = f"pyzmq {facts.pyzmq} on libzmq {facts.libzmq}"
    if facts.has_curve:
        yield Finding("ok", "ZeroMQ", f"{text}, with CURVE")
    else:
        yield Finding("fail", "ZeroMQ", f"{text} has no CURVE: TCP is refused", "pip install pyzmq from a wheel")


def _devices() -> Iterator[Finding]:
    from rpcrl.runtime.loading import loading

    with loading():
        import torch

    count = torch.cuda.device_count()
    if not count:
        yield Finding("ok", "devices", "no CUDA device that torch can use; device=cpu counts virtual ones")
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield Finding("ok", f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = "" if soft >= MIN_OPEN_FILES else f"ulimit -n {min(hard, 65536)}"
    yield Finding("ok" if not remedy else "note", "open files", f"{soft} allowed ({hard} at most)", remedy)


def _shared_memory() -> Iterator[Finding]:
    path = Path("/dev/shm")
    if not path.is_dir():
        yield Finding("note", "/dev/shm", "is not there; large tensors go through sockets", "mount a tmpfs on /dev/shm")
        return
    usage = shutil.disk_usage(path)
    text = f"{usage.free / 2**20:.0f} MiB free of {usage.total / 2**20:.0f} MiB"
    if usage.free < MIN_SHM_BYTES:
        yield Finding("note", "/dev/shm", text, "free some, or give the container more (docker run --shm-size=2g)")
    else:
        yield Finding("ok", "/dev/shm", text)


def _sockets() -> Iterator[Finding]:
    from rpcrl.leftovers import run_parent

    parent = run_parent()
    longest = len(str(parent)) + len("/rpcrl-") + 32 + len("/control.sock")
    mode = stat.S_IMODE(parent.stat().st_mode)
    text = f"{parent} (mode {mode:04o}): run directories are made in it with mode 0700"
    if not os.access(parent, os.W_OK | os.X_OK):
        yield Finding("fail", "socket directory", f"{parent} is not writable", "set TMPDIR or XDG_RUNTIME_DIR")
    elif longest > SOCKET_PATH_BYTES:
        yield Finding(
            "fail",
            "socket directory",
            f"socket paths under {parent} have up to {longest} bytes, and Linux takes {SOCKET_PATH_BYTES}",
            "set XDG_RUNTIME_DIR or TMPDIR to a shorter path",
        )
    else:
        yield Finding("ok", "socket directory", text)


def _ports() -> Iterator[Finding]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yield Finding("ok", "ports", f"a port of 127.0.0.1 could be bound (the kernel gave {port})")


def _runs(*, clean: bool) -> Iterator[Finding]:
    from rpcrl.leftovers import find_processes, find_stale_runs, run_parent, sweep_stale_runs

    parent = run_parent()
    stale = find_stale_runs(parent)
    for directory, owner in stale:
        processes = find_processes(owner.run_id)
        text = f"run {owner.run_id}: driver {owner.pid} is dead; {len(processes)} processes and {directory} are left"
        yield Finding("note", "leftovers", text, "" if clean else "rpcrl doctor --clean")
    if clean:
        swept = sweep_stale_runs(parent)
        yield Finding("ok", "cleaned", f"{len(swept)} dead runs were removed; living runs were not touched")
    elif not stale:
        yield Finding("ok", "leftovers", "none")
    dead = {directory for directory, _ in stale}
    for directory in sorted(parent.glob("rpcrl-*")):
        if directory not in dead:
            yield from _listeners(directory)


def _listeners(directory: Path) -> Iterator[Finding]:
    """Tell what a living run of this user listens on: its Unix sockets, and TCP ports of its processes."""
    import psutil

    from rpcrl.leftovers import OWNER_FILE, find_processes

    try:
        owner = json.loads((directory / OWNER_FILE).read_text(encoding="utf-8"))
        run_id, driver = str(owner["run_id"]), int(owner["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    sockets = sorted(entry.name for entry in directory.rglob("*") if stat.S_ISSOCK(entry.lstat().st_mode))
    pids = [driver, *find_processes(run_id)]
    yield Finding(
        "ok", "running", f"run {run_id}: driver {driver}, {len(pids)} processes; {directory}: {', '.join(sockets)}"
    )
    for pid in pids:
        try:
            connections = psutil.Process(pid).net_connections(kind="inet")
        except psutil.Error:
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                yield Finding("ok", "listening", f"pid {pid}: tcp {connection.laddr.ip}:{connection.laddr.port}")
