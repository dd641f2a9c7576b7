"""Worker groups with real processes, on Unix sockets and on TCP with CURVE."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from rpcrl import ClassWithInitArgs, Controller, DataProto, ResourcePool, WorkerGroup
from rpcrl.errors import (
    CallTimeoutError,
    ClosedError,
    CollectError,
    DispatchError,
    EncodeError,
    RemoteError,
    UnknownMethodError,
    UsageError,
)
from tests.cluster.group_workers import Child, Concurrent, IgnoresSigterm, Meshed, OpenToy, Toy, keep

pytestmark = pytest.mark.cluster


def batch_of(num_rows: int) -> DataProto:
    return DataProto.from_dict(
        tensors={"x": torch.arange(num_rows * 2, dtype=torch.float32).reshape(num_rows, 2)},
        non_tensors={"name": [f"row {row}" for row in range(num_rows)]},
        meta_info={"step": 3},
    )


def test_every_mode_on_both_transports(controller: Controller):
    group = WorkerGroup(ResourcePool([3]), Toy, 10, label="hello")
    assert group.add(1, y=2) == [13, 13, 13]
    assert group.one_each(["a", "b", "c"]) == [(0, "a"), (1, "b"), (2, "c")]
    assert group.only_zero(5) == (0, 5)
    assert group.zero_by_execution([1, 2, 3]) == (0, [1, 2, 3])
    for num_rows in (1, 2, 3, 4, 7):
        batch = batch_of(num_rows)
        doubled = group.double(batch)
        assert torch.equal(doubled.batch["x"], batch_of(num_rows).batch["x"] * 2)
        assert list(doubled.non_tensor_batch["name"]) == [f"row {row}" for row in range(num_rows)]
        assert doubled.meta_info["step"] == 3
        assert len(batch) == num_rows
        assert torch.equal(batch.batch["x"], batch_of(num_rows).batch["x"]), "the caller's batch is as it was"
    sizes = group.sizes(batch_of(10))
    assert list(sizes.non_tensor_batch["size"]) == [4] * 4 + [3] * 3 + [3] * 3
    with pytest.raises(CollectError, match="padding cannot be taken off"):
        group.shorten(batch_of(4))


def test_ranks_environment_and_secrets(controller: Controller):
    group = WorkerGroup(ResourcePool([2, 1]), Toy, environment={"MY_SETTING": "7"})
    seats = group.where()
    assert [seat["rank"] for seat in seats] == [0, 1, 2]
    assert [(seat["node_rank"], seat["local_rank"], seat["local_world_size"]) for seat in seats] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 1),
    ]
    for seat in seats:
        variables = seat["environment"]
        assert seat["threads"] == "1"
        assert variables["MY_SETTING"] == "7"
        assert variables["RPCRL_RUN_ID"] == controller.run_id
        assert variables["MASTER_ADDR"] == "127.0.0.1"
        assert int(variables["MASTER_PORT"]) > 0
        assert variables["CUDA_VISIBLE_DEVICES"] == ""
        secrets = [keys for keys in controller._allowed if any(keys in value for value in variables.values())]
        assert secrets == []
        assert not any("secret" in name.lower() for name in variables)
    assert len({seat["environment"]["MASTER_PORT"] for seat in seats}) == 1
    with pytest.raises(DispatchError, match="environment may not set RANK"):
        WorkerGroup(ResourcePool([1]), Toy, environment={"RANK": "0"})


def test_the_ranks_meet_in_torch_distributed(ipc: Controller):
    assert WorkerGroup(ResourcePool([3]), Toy).all_reduce() == [6.0, 6.0, 6.0]


def test_meshes_and_functions(ipc: Controller):
    group = WorkerGroup(ResourcePool([8]), Meshed)
    batch = DataProto.from_dict(non_tensors={"x": list(range(7))})
    over_tp = group.over_tp(batch)
    assert list(over_tp.non_tensor_batch["x"]) == list(range(7))
    assert list(over_tp.non_tensor_batch["rank"]) == [0, 0, 2, 2, 4, 4, 6]
    over_pp = group.over_pp(batch=batch)
    assert list(over_pp.non_tensor_batch["x"]) == list(range(7))
    assert list(over_pp.non_tensor_batch["rank"]) == [4] * 4 + [6] * 3
    assert list(group.apply(keep, batch).non_tensor_batch["x"]) == list(range(7))
    with pytest.raises(RuntimeError, match=r"has no mesh 'lame' on rank 3 \(registered: 'tp', 'pp'\)"):
        group.over_lame(batch)
    with pytest.raises(RuntimeError, match="has no mesh 'nowhere'"):
        group.over_nothing(batch)
    with pytest.raises(EncodeError, match="lambda"):
        group.apply(lambda rows: rows, batch)


def test_methods_by_name_are_the_classes_own_choice(ipc: Controller):
    closed = WorkerGroup(ResourcePool([2]), Toy)
    assert closed.execute_all("one_each", 5).result(20) == [(0, 5), (1, 5)], "how it is registered plays no part"
    assert closed.execute_rank_zero("add", 1, y=2).result(20) == 3
    with pytest.raises(UnknownMethodError, match="is not registered"):
        closed.execute_all("init_process_group")
    opened = WorkerGroup(ResourcePool([2]), OpenToy)
    assert opened.execute_all("plain", 4).result(20) == [4, 5]
    assert opened.execute_rank_zero("plain", 4).result(20) == 4
    for name in ("_hidden", "__init__", "no_such", "attribute"):
        with pytest.raises(UnknownMethodError):
            opened.execute_all(name)
    with pytest.raises(UnknownMethodError, match="not registered"):
        opened.plain(4)


def test_a_group_that_nobody_holds_ends_and_gives_its_share_back(ipc: Controller):
    pool = ResourcePool([2], max_colocate_count=1)
    group = WorkerGroup(pool, Toy)
    pids = [seat["pid"] for seat in group.where()]
    view = group.spawn()["Toy"]
    del group
    gc.collect()
    assert view.inc() == [1, 1], "a view holds the group"
    del view
    gc.collect()
    _gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    assert alive == []
    deadline = time.monotonic() + 10
    while True:
        try:
            WorkerGroup(pool, Toy).close()
            break
        except DispatchError:
            assert time.monotonic() < deadline, "the share did not come back"


def test_submit_await_and_deadlines(ipc: Controller, tmp_path: Path):
    group = WorkerGroup(ResourcePool([2]), Toy)
    gate = tmp_path / "gate"
    future = group.slow_inc(str(gate))
    assert not future.done()
    assert "waiting for ranks [0, 1]" in repr(future)
    with pytest.raises(CallTimeoutError, match=r"no reply from ranks \[0, 1\] within 0.2 s"):
        future.result(timeout_s=0.2)
    with pytest.raises(CallTimeoutError, match=r"register\(timeout_s"):
        group.with_deadline(str(gate))
    gate.touch()
    assert future.result(timeout_s=20) == [1, 1]
    assert group.inc() == [2, 2]

    async def driver() -> list[list[int]]:
        return await asyncio.gather(group.inc.submit(), group.add.submit(1))

    assert asyncio.run(driver()) == [[3, 3], [1, 1]]


def test_cancel(ipc: Controller, tmp_path: Path):
    group = WorkerGroup(ResourcePool([2]), Toy)
    gate = tmp_path / "gate"
    running, queued = group.slow_inc(str(gate)), group.inc.submit()
    assert queued.cancel()
    assert not queued.cancel(), "it is settled"
    with pytest.raises(concurrent.futures.CancelledError, match=r"Toy\.inc on group .* was cancelled"):
        queued.result(5)
    assert group.has_heard() == [True, True], "else a worker could pass the gate before it hears of the cancelling"
    gate.touch()
    assert running.result(20) == [1, 1]
    assert not running.cancel()
    assert group.inc() == [2, 2], "the cancelled call never ran"
    meeting = WorkerGroup(ResourcePool([1]), Concurrent)
    alone = meeting.meet.submit("first")
    deadline = time.monotonic() + 20
    while meeting.seen() != [["enter first"]]:
        assert time.monotonic() < deadline
    assert meeting.update.submit().cancel()
    assert alone.cancel()
    assert meeting.update() == [["enter first", "update"]], "a running coroutine was cancelled and left the gate"


def test_arguments_may_change_as_soon_as_submit_returns(ipc: Controller, tmp_path: Path):
    group = WorkerGroup(ResourcePool([1]), Toy)
    gate = tmp_path / "gate"
    blocker = group.slow_inc(str(gate))
    tensor = torch.ones(300_000)
    future = group.echo.submit(tensor)
    tensor.zero_()
    gate.touch()
    assert future.result(20)[0].sum() == 300_000
    assert blocker.result(20) == [1]


def test_async_methods_run_side_by_side_and_an_update_waits(ipc: Controller):
    group = WorkerGroup(ResourcePool([1]), Concurrent)
    first = group.meet.submit("first")
    second = group.meet.submit("second")
    update = group.update.submit()
    assert first.result(30) == ["first"]
    assert second.result(30) == ["second"]
    (events,) = update.result(30)
    assert events[:2] == ["enter first", "enter second"]
    assert events[-1] == "update"
    assert sorted(events[2:4]) == ["leave first", "leave second"]


def test_colocated_roles_share_the_process_and_see_each_other(controller: Controller):
    group = WorkerGroup(
        ResourcePool([2]), {"actor": ClassWithInitArgs(Child, 1), "actor_rollout": ClassWithInitArgs(Child, value=2)}
    )
    views = group.spawn()
    assert list(views) == ["actor", "actor_rollout"]
    assert views["actor"].pid() == views["actor_rollout"].pid()
    assert len(set(views["actor"].pid())) == 2
    assert views["actor"].neighbour("actor_rollout") == [2, 2]
    assert views["actor_rollout"].neighbour("actor") == [1, 1]
    with pytest.raises(RuntimeError, match="no role 'critic' in this process; here are: actor, actor_rollout"):
        views["actor"].neighbour("critic")
    with pytest.raises(UnknownMethodError, match="hosts several roles"):
        group.pid()
    views["actor"].close()
    with pytest.raises(ClosedError):
        views["actor_rollout"].pid()


def test_wrong_calls_are_refused_before_anything_is_sent(ipc: Controller):
    group = WorkerGroup(ResourcePool([2]), Toy)
    with pytest.raises(DispatchError, match=r"Toy\.add\(x: int, \*, y: int = 0\)"):
        group.add(1, z=3)
    with pytest.raises(UnknownMethodError, match="did you mean where"):
        group.wher()
    with pytest.raises(UnknownMethodError, match="not registered: mark it with @register"):
        group.init_process_group()
    with pytest.raises(EncodeError, match=r"args\[0\]\[1\]"):
        group.echo([1, threading.Lock()])
    with pytest.raises(RemoteError, match="lock"):
        group.unencodable()
    assert group.inc() == [1, 1], "the group goes on"


def test_a_pool_has_room_for_max_colocate_count_groups(ipc: Controller):
    pool = ResourcePool([1], max_colocate_count=2)
    first = WorkerGroup(pool, Toy)
    with WorkerGroup(pool, Toy), pytest.raises(DispatchError, match="each worker of this pool takes 1/2"):
        WorkerGroup(pool, Toy)
    third = WorkerGroup(pool, Toy)
    assert first.inc() == third.inc() == [1]


def test_p22_close_is_synchronous_and_escalates(ipc: Controller):
    group = WorkerGroup(ResourcePool([2]), IgnoresSigterm)
    pids = group.pid()
    exits = group.close(grace_s=0.3)
    assert sorted(end.pid for end in exits) == sorted(pids)
    assert {end.signal for end in exits} == {"SIGKILL"}
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert group.close() is exits


def test_a_stray_attribute_is_no_remote_call(ipc: Controller):
    group = WorkerGroup(ResourcePool([1]), Toy)
    assert not hasattr(group, "nothing_of_the_kind")
    assert group.add.__name__ == "add"


def test_closed_controller_says_so(tmp_path: Path):
    with Controller(log_dir=tmp_path) as controller:
        group = WorkerGroup(ResourcePool([1]), Toy)
    with pytest.raises(ClosedError, match=controller.run_id):
        group.inc()
    with pytest.raises(UsageError, match="no controller is open"):
        WorkerGroup(ResourcePool([1]), Toy)


def test_p75_a_thief_cannot_take_a_groups_port_before_its_store_has_it(ipc: Controller):
    groups = [WorkerGroup(ResourcePool([2], name=f"pool {index}"), Toy) for index in range(3)]
    ports = [int(group.where()[0]["environment"]["MASTER_PORT"]) for group in groups]
    for port in ports:
        with socket.socket() as thief, pytest.raises(OSError, match="Address already in use"):
            thief.bind(("127.0.0.1", port))
    waiting = [group.all_reduce.submit() for group in groups]
    assert [future.result(60) for future in waiting] == [[3.0, 3.0]] * 3


def test_p75_many_groups_start_at_once(ipc: Controller):
    """Twenty groups that all need a port for their store, started from parallel threads."""
    results: list[object] = []

    def run(index: int) -> None:
        try:
            group = WorkerGroup(ResourcePool([1], name=f"pool {index}"), Toy, index)
            results.append((index, group.add(0)[0], group.where()[0]["environment"]["MASTER_PORT"]))
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    assert len(results) == 20
    assert [entry for entry in results if isinstance(entry, BaseException)] == []
    assert all(index == value for index, value, _ in results)
    assert len({port for *_, port in results}) == 20


def test_the_time_and_the_bytes_of_a_call_can_be_read(controller: Controller, tmp_path: Path):
    group = WorkerGroup(ResourcePool([2]), Toy, controller=controller)
    assert group.slow_inc.timing is None
    gate = tmp_path / "gate"
    future = group.slow_inc(str(gate))
    assert group.slow_inc.timing is None, "the value of the latest call is not there"
    queued = group.add.submit(1)
    for _ in range(20):  # long against the way to a thread: the method has begun, and the next one waits
        group.has_heard()
    gate.touch()
    assert queued.result() == [1, 1]
    assert group.slow_inc.timing is None, "nobody has asked for the value yet"
    future.result()
    slow, quick = group.slow_inc.timing, group.add.timing
    for timing in (slow, quick):
        assert timing is not None
        parts = (timing.encode_s, timing.send_s, timing.queue_s, timing.run_s, timing.return_s, timing.collect_s)
        assert all(part >= 0 for part in parts)
        assert 0 < sum(parts) <= timing.total_s + 1e-6
        assert (timing.encodes, timing.shared_bytes, timing.copied_bytes) == (1, 0, 0)
        assert 0 < timing.sent_bytes < 1000
    assert slow is not None
    assert quick is not None
    assert slow.run_s > slow.queue_s, "it waited in the method"
    assert quick.queue_s > quick.run_s, "it waited for the method before it"
