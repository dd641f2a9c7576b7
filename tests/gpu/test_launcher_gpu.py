"""Does ``device="cuda"`` give each worker one real GPU of its own, and ``device="cpu"`` none?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cluster.fake_controller import FakeController

pytestmark = [pytest.mark.gpu, pytest.mark.cluster]


def seen_gpus(controller: FakeController, identity: str) -> list[str]:
    """Return the UUIDs of the GPUs that a worker has computed on."""
    controller.until(lambda: any(line.startswith("CUDA ") for line in controller.lines(identity)), within_s=120)
    line = next(line for line in controller.lines(identity) if line.startswith("CUDA "))
    uuids: list[str] = json.loads(line.removeprefix("CUDA "))
    return uuids


def test_cuda_workers_have_one_real_gpu_each_and_cpu_workers_none(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    controller = FakeController(None, tmp_path, device="cuda", console="all")
    try:
        controller.start(*[[["cuda"]]] * count, device="cuda")
        controller.start([["cuda"]], name="plain", device="cpu")
        gpus = [seen_gpus(controller, f"g-{rank}") for rank in range(count)]
        expected = [[str(torch.cuda.get_device_properties(index).uuid)] for index in range(count)]
        assert sorted(gpus) == sorted(expected)
        assert seen_gpus(controller, "plain-0") == []
        hello = controller.hello()
        assert hello is not None
        assert len(hello.devices) == count
        # One worker more than there are GPUs is refused, with both numbers.
        controller.start(*[[]] * (count + 1), name="many", device="cuda")
        controller.until(lambda: "many-0" in controller.exits())
        assert f"needs device number {count + 1}, but this node has {count}" in controller.exits()["many-0"].start_error
    finally:
        assert controller.close() == 0
