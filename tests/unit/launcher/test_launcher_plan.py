"""Does the plan give each worker the right command, variables and device, and refuse with all problems at once?"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from launcher.devices import Inventory, find_devices, parse_nvidia_smi
from launcher.plan import Node, plan_workers
from rpcrl import env
from rpcrl.errors import ConfigError
from rpcrl.logs import log_name
from rpcrl.topology import ResourcePool
from rpcrl.wire.messages import StartWorkers, WorkerStart


def group(counts=(2,), *, device="cpu", environment=None, offset=(), name="actor") -> StartWorkers:
    pool = ResourcePool(counts, device=device, _slot_offset=offset)
    workers = tuple(
        WorkerStart(
            identity=f"{name}-{seat.rank}",
            rank=seat.rank,
            world_size=seat.world_size,
            node_rank=seat.node_rank,
            local_rank=seat.local_rank,
            local_world_size=seat.local_world_size,
            device_slot=seat.device_slot,
            roles=("actor",),
            bootstrap=b"secret",
        )
        for seat in pool.placements()
    )
    return StartWorkers(name, "my.module", device, workers, environment or {})


def node(environment=None, devices=(), **changes) -> Node:
    inventory = Inventory(tuple(devices), "a test's list")
    base = Node("run-1", "/logs", "/usr/bin/python", 77, environment or {}, inventory)
    return dataclasses.replace(base, **changes)


def test_every_worker_gets_torchrun_names_threads_and_its_identity() -> None:
    specs = plan_workers(group((2, 1)), node({"PATH": "/bin"}))
    assert [spec.argv for spec in specs] == [("/usr/bin/python", "-P", "-m", "launcher.shim", "my.module")] * 3
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    assert [tuple(spec.environment[name] for name in names) for spec in specs] == [
        ("0", "3", "0", "2", "0"),
        ("1", "3", "1", "2", "0"),
        ("2", "3", "0", "1", "1"),
    ]
    last = specs[2].environment
    assert last["PATH"] == "/bin"
    assert (last[env.RUN_ID], last[env.WORKER_ID], last[env.PARENT_PID]) == ("run-1", "actor-2", "77")
    assert {last[name] for name in env.THREAD_VARIABLES} == {"1"}
    assert last["PYTHONUNBUFFERED"] == "1"
    assert "MASTER_PORT" not in last, "rank 0 picks the port; the controller hands it on"
    assert specs[2].log_path == "/logs/actor.rank2.log"


def test_nothing_secret_is_in_the_environment_or_the_command() -> None:
    for spec in plan_workers(group(), node()):
        assert "secret" not in " ".join([*spec.argv, *spec.environment.values()])
        assert "secret" not in repr(spec)
        assert spec.bootstrap == b"secret"


def test_outer_launcher_variables_are_stripped_and_slurm_job_ones_stay() -> None:
    outer = {
        "RANK": "7",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "x",
        "GROUP_RANK": "1",
        "ROLE_WORLD_SIZE": "4",
        "SLURM_PROCID": "3",
        "PMI_RANK": "3",
        "SLURM_JOB_ID": "12",
        "HOME": "/root",
        "OMP_NUM_THREADS": "64",
        env.BOOTSTRAP_FD: "9",
    }
    environment = plan_workers(group((1,)), node(outer))[0].environment
    assert environment["RANK"] == "0"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment[env.BOOTSTRAP_FD] == "3"
    assert (environment["SLURM_JOB_ID"], environment["HOME"]) == ("12", "/root")
    stripped = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "ROLE_WORLD_SIZE", "SLURM_PROCID", "PMI_RANK")
    assert [name for name in stripped if name in environment] == []


def test_the_group_may_set_threads_and_its_own_variables() -> None:
    spec = plan_workers(group(environment={"OMP_NUM_THREADS": "4", "MY": "1"}), node({"MY": "0"}))[0]
    assert (spec.environment["OMP_NUM_THREADS"], spec.environment["MY"]) == ("4", "1")
    assert spec.environment["MKL_NUM_THREADS"] == "1"


def test_workers_ask_for_huge_pages_unless_somebody_says_no() -> None:
    no = {env.HUGE_PAGES: "0"}
    asked = [plan_workers(group(environment=own), node(outer))[0] for own, outer in (({}, {}), (no, {}), ({}, no))]
    assert [spec.environment[env.HUGE_PAGES] for spec in asked] == ["1", "0", "0"]


def test_protected_and_impossible_variables_are_refused_together() -> None:
    bad = {"RANK": "0", env.VISIBLE_DEVICES: "1", "A=B": "x", "NUL": "a\0b"}
    with pytest.raises(ConfigError) as caught:
        plan_workers(group((4,), device="cuda", environment=bad), node(devices=["0"]))
    text = str(caught.value)
    for name in bad:
        assert repr(name) in text
    # The same answer names the ranks that have no device.
    assert len(caught.value.violations) == 4 + 3
    assert "local rank 3 needs device number 4, but this node has 1 (0; from a test's list)" in text


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("3,1", ["3", "1"]),
        ("GPU-aaaa,GPU-bbbb", ["GPU-aaaa", "GPU-bbbb"]),
        ("MIG-1234,MIG-5678", ["MIG-1234", "MIG-5678"]),
        (" 0 , 1 ", ["0", "1"]),
        ("7", ["7", None]),
        ("2,-1,3", ["2", None]),
        ("", [None, None]),
        ("-1", [None, None]),
    ],
)
def test_p40_each_worker_gets_one_entry_of_the_visible_list(visible: str, expected: list[str | None]) -> None:
    environment = {env.VISIBLE_DEVICES: visible}
    here = node(environment, inventory=find_devices(environment))
    request = group((2,), device="cuda")
    if None not in expected:
        specs = plan_workers(request, here)
        assert [spec.environment[env.VISIBLE_DEVICES] for spec in specs] == expected
        assert [spec.device for spec in specs] == expected
        return
    with pytest.raises(ConfigError) as caught:
        plan_workers(request, here)
    text = str(caught.value)
    assert len(caught.value.violations) == expected.count(None)
    assert repr(visible) in text
    assert "rank 1" in text
    assert "device=cpu" in text


@pytest.mark.parametrize("device", ["cpu", None])
def test_p42_without_real_devices_any_number_of_workers_is_planned_and_sees_no_gpu(device: str | None) -> None:
    specs = plan_workers(group((16,), device=device), node({env.VISIBLE_DEVICES: "0,1"}, devices=["0", "1"]))
    assert [spec.environment[env.VISIBLE_DEVICES] for spec in specs] == [""] * 16


def test_two_ranks_on_one_device_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rank 2: would share device 0 with rank 0 .*NCCL") as caught:
        plan_workers(group((2, 2), device="cuda"), node(devices=["0", "1"]))
    assert len(caught.value.violations) == 2
    with pytest.raises(ConfigError, match="share device 5"):
        plan_workers(group((2,), device="cuda"), node(devices=["5", "5"]))
    specs = plan_workers(group((2, 2), device="cuda", offset=(0, 2)), node(devices="0123"))
    assert [spec.device for spec in specs] == ["0", "1", "2", "3"]


def test_device_order_is_fixed_only_for_a_list_that_the_launcher_made() -> None:
    found = dataclasses.replace(node(), inventory=Inventory(("0",), "nvidia-smi -L", pci_order=True))
    assert plan_workers(group((1,), device="cuda"), found)[0].variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER" not in plan_workers(group((1,), device="cuda"), node(devices=["0"]))[0].variables


def test_nvidia_smi_is_read_with_and_without_mig() -> None:
    plain = "GPU 0: NVIDIA H200 (UUID: GPU-11-22)\nGPU 1: NVIDIA H200 (UUID: GPU-33-44)\n"
    assert parse_nvidia_smi(plain) == ("0", "1")
    mig = (
        "GPU 0: NVIDIA A100 (UUID: GPU-11-22)\n  MIG 1g.5gb Device 0: (UUID: MIG-a)\n"
        "  MIG 1g.5gb Device 1: (UUID: MIG-b)\nGPU 1: NVIDIA A100 (UUID: GPU-33-44)\n"
    )
    assert parse_nvidia_smi(mig) == ("MIG-a", "MIG-b", "GPU-33-44")
    assert parse_nvidia_smi("No devices found\n") == ()


def test_log_names_are_file_names_and_never_collide() -> None:
    assert log_name("actor", 3) == "actor.rank3.log"
    awkward = ["a/b", "a_b", "../x", "a b", "", "."]
    names = [log_name(name, 0) for name in awkward]
    assert len(set(names)) == len(awkward)
    assert all("/" not in name and not name.startswith(".") for name in names)


# ---- python -m launcher plan -------------------------------------------------------------------------------------


def run_plan(layout: object) -> tuple[int, dict[str, list[dict[str, object]]], str]:
    text = layout if isinstance(layout, str) else json.dumps(layout)
    done = subprocess.run([sys.executable, "-m", "launcher", "plan"], input=text, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def test_plan_prints_processes_without_secrets_and_without_what_is_inherited(environment) -> None:
    environment["UNRELATED"] = "x"
    layout = {
        "log_dir": "/tmp/l",
        "devices": ["3", "1", "0"],
        "groups": [
            {"group": "actor", "process_on_nodes": [2, 1], "device": "cuda", "environment": {"HF_TOKEN": "t0p"}},
            {"group": "reward", "process_on_nodes": [2], "device": None, "roles": ["reward"]},
        ],
    }
    status, answer, _ = run_plan(layout)
    assert (status, answer["violations"]) == (0, [])
    processes = answer["processes"]
    assert [(item["group"], item["rank"], item["device"]) for item in processes] == [
        ("actor", 0, "3"),
        ("actor", 1, "1"),
        ("actor", 2, "0"),
        ("reward", 0, None),
        ("reward", 1, None),
    ]
    assert processes[0]["argv"][1:] == ["-P", "-m", "launcher.shim", "rpcrl.runtime.worker_main"]
    assert processes[1]["environment"]["HF_TOKEN"] == "***"
    assert processes[1]["environment"][env.VISIBLE_DEVICES] == "1"
    assert processes[4]["log_path"] == "/tmp/l/reward.rank1.log"
    assert "UNRELATED" not in processes[0]["environment"]
    assert "t0p" not in json.dumps(answer)


def test_plan_reports_the_mistakes_of_all_groups_together() -> None:
    layout = {
        "devices": ["0"],
        "groups": [
            {"group": "a", "process_on_nodes": [2], "device": "cuda"},
            {"group": "b", "process_on_nodes": [0], "environment": {"X": 1}, "colour": "red"},
            {"group": "c", "environment": {"RANK": "1"}},
            "d",
        ],
    }
    status, answer, _ = run_plan(layout)
    assert (status, answer["processes"]) == (2, [])
    keys = [item["key"] for item in answer["violations"]]
    assert keys == [
        "group 'a', rank 1 (local rank 1)",
        "groups[1].colour",
        "groups[1].environment",
        "groups[1].process_on_nodes",
        "group 'c', environment['RANK']",
        "groups[3]",
    ]


@pytest.mark.parametrize("text", ["{", "[]"])
def test_plan_refuses_what_is_no_layout(text: str) -> None:
    status, answer, error = run_plan(text)
    assert (status, answer) == (2, {})
    assert error


def test_the_launcher_loads_nothing_heavy() -> None:
    code = "import sys, launcher.plan, launcher.supervise, launcher.shim; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in ("torch", "numpy", "zmq", "pydantic", "transformers"):
        assert f"'{name}'" not in done.stdout
