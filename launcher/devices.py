"""Which devices does this node have? From the visible-devices variable, else nvidia-smi, else /dev/nvidia*."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rpcrl import env
from rpcrl.topology import parse_visible_devices

__all__ = ["Inventory", "find_devices", "parse_nvidia_smi"]

_GPU = re.compile(r"^GPU (?P<index>\d+): .*\(UUID: (?P<uuid>GPU-[^)]+)\)")
_MIG = re.compile(r"^\s+MIG .*\(UUID: (?P<uuid>MIG-[^)]+)\)")


@dataclass(frozen=True)
class Inventory:
    """The devices that workers of this node may be given, by index, UUID or MIG id."""

    devices: tuple[str, ...] = ()
    source: str = "no device was looked for"
    """Where the list comes from; stands in error messages."""
    pci_order: bool = False
    """The ids are indices in PCI order, so workers need ``CUDA_DEVICE_ORDER=PCI_BUS_ID``."""


def find_devices(environment: Mapping[str, str], *, timeout_s: float = 10.0) -> Inventory:
    """Return the node's devices. A list that the user made visible is obeyed, also an empty one."""
    visible = environment.get(env.VISIBLE_DEVICES)
    if visible is not None:
        return Inventory(tuple(parse_visible_devices(visible)), f"{env.VISIBLE_DEVICES}={visible!r}")
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        try:
            done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=timeout_s, check=True)
        except (OSError, subprocess.SubprocessError):
            pass
        else:
            return Inventory(parse_nvidia_smi(done.stdout), "nvidia-smi -L", pci_order=True)
    nodes = sorted(
        (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")),
        key=lambda name: (len(name), name),
    )
    return Inventory(tuple(nodes), "/dev/nvidia*", pci_order=True)


def parse_nvidia_smi(text: str) -> tuple[str, ...]:
    """Return the device ids in the output of ``nvidia-smi -L``.

    A GPU that is cut into MIG instances stands for its instances. As CUDA does not mix indices with MIG ids,
    whole GPUs beside them are named by UUID; without any MIG instance all are named by index.
    """
    gpus: list[tuple[str, str, list[str]]] = []
    for line in text.splitlines():
        if gpu := _GPU.match(line):
            gpus.append((gpu["index"], gpu["uuid"], []))
        elif (instance := _MIG.match(line)) and gpus:
            gpus[-1][2].append(instance["uuid"])
    if not any(instances for _, _, instances in gpus):
        return tuple(index for index, _, _ in gpus)
    return tuple(name for _, uuid, instances in gpus for name in (instances or [uuid]))
