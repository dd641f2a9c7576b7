"""Does every prompt have one end, whatever becomes of the replicas that sample it?"""

import logging

import pytest

from rpcrl.errors import BatchError, RemoteError, RpcrlError, WorkerExit, WorkerLostError
from rpcrl.tasks.sort_digits import base_checkpoint
from rpcrl.testing.engine_kit import make_prompts
from rpcrl.trainer.group_sampler import FixedReplicas, GroupSampler
from rpcrl.trainer.prompt_queue import PromptQueue
from rpcrl.trainer.replay_buffer import ReplayBuffer
from rpcrl.trainer.steps import Sampling

SAMPLING = Sampling(n=2, do_sample=True, temperature=1.0, top_p=1.0, top_k=-1, response_length=4, seed=0)


class Loader:
    """Batches of four prompts without end, with uids 0-0, 0-1, …"""

    def __init__(self):
        self.given = 0

    def prompts(self, uids):
        batch = make_prompts(groups=len(uids), n=1)
        batch.non_tensor_batch["uid"][:] = list(uids)
        batch.non_tensor_batch["data_source"] = batch.non_tensor_batch["uid"].copy()
        batch.non_tensor_batch["data_source"][:] = "task"
        return batch

    def next_batch(self):
        uids = [f"0-{number}" for number in range(self.given, self.given + 4)]
        self.given += 4
        return self.prompts(uids)


class Call:
    """What a submitted call gives back: settled by the test."""

    def __init__(self, request):
        self.request = request
        self.cancelled = False
        self._callbacks = []
        self._end = None

    @property
    def uid(self):
        return str(self.request.non_tensor_batch["uid"][0])

    def add_done_callback(self, callback):
        self._callbacks.append(callback)
        if self._end is not None:
            callback(self)

    def cancel(self):
        self.cancelled = True

    def result(self, timeout_s):
        if isinstance(self._end, Exception):
            raise self._end
        return self._end

    def end(self, value):
        self._end = value
        for callback in self._callbacks:
            callback(self)

    def answer(self, version=0, reason="stop"):
        from rpcrl.engines.request_batches import batch_of
        from rpcrl.engines.requests import SampleOutput

        outputs = [SampleOutput(str(row), [5, 1], [-0.5, -0.5], [version, version], reason) for row in range(2)]
        self.end(batch_of(self.request, outputs, pad_token_id=0))


class Worker:
    """A replica: answers at once by ``behave``, which may also leave a call unanswered."""

    def __init__(self, behave=Call.answer):
        self.behave = behave
        self.calls = []
        self.sample = self

    def submit(self, request):
        call = Call(request)
        self.calls.append(call)
        if self.behave is not None:
            self.behave(call)
        return call


class Restartable:
    """Replicas of which one may be lost and come back when it is waited for."""

    reads_prompts = False

    def __init__(self, workers):
        self.workers = dict(workers)
        self.gone = {}
        self.waits = 0

    def live(self):
        return self.workers

    def lost(self, name, error):
        self.gone.update({name: self.workers.pop(name)} if name in self.workers else {})

    def served(self, name):
        pass

    def await_one(self):
        self.waits += 1
        self.workers = {f"{name} again": Worker() for name in self.gone}


def sampler_of(replicas, *, first=(), strategy="wait", timeout_s=60.0, most_failures=8, max_staleness=1, **more):
    if isinstance(replicas, dict):
        replicas = Restartable(replicas)
    buffer = ReplayBuffer(max_staleness=max_staleness, strategy=strategy)
    queue = PromptQueue(Loader(), first=first)
    sampler = GroupSampler(
        replicas, queue, buffer, SAMPLING, task_timeout_s=timeout_s, most_failures=most_failures, **more
    )
    return sampler, buffer


def take(sampler, count=4, version=0, later=0, limit=4):
    batch = sampler.take(count, version=version, later=later, limit=limit)
    return [str(uid) for uid in batch.non_tensor_batch["uid"][:: SAMPLING.n]]


def remote_error(message):
    return RemoteError(type_name="RuntimeError", message=message, traceback_text="", method="sample", rank=0)


def lost():
    end = WorkerExit("rollout.0", "rollout", 0, ("rollout",), "here", 1, None, "SIGKILL", 0, False, (), "")
    return WorkerLostError([end])


def test_groups_of_n_stay_together_with_their_prompts_columns():
    sampler, _ = sampler_of({"a": Worker()})
    batch = sampler.take(4, version=0, later=0, limit=4)
    assert list(batch.non_tensor_batch["uid"]) == [f"0-{number // 2}" for number in range(8)]
    assert list(batch.non_tensor_batch["sample_index"]) == [0, 1] * 4
    assert set(batch.non_tensor_batch["data_source"]) == {"task"}
    assert batch.meta_info == {"temperature": 1.0}
    assert sampler.unfinished() == []


def test_prompts_are_spread_over_the_replicas_and_no_more_are_in_flight_than_allowed():
    workers = {"a": Worker(None), "b": Worker(None)}
    sampler, buffer = sampler_of(workers)
    sampler.fill(6, version=0)
    assert [len(worker.calls) for worker in workers.values()] == [3, 3]
    sampler.fill(6, version=0)
    assert len(buffer) == 6
    assert sampler.unfinished() == [f"0-{number}" for number in range(8)], "two are drawn and wait"


def test_unfinished_prompts_of_an_earlier_life_go_first():
    sampler, _ = sampler_of({"a": Worker()}, first=["0-90", "0-70"])
    assert take(sampler) == ["0-90", "0-70", "0-0", "0-1"]


def test_a_failed_group_is_dropped_named_and_replaced(caplog):
    def behave(call):
        if call.uid == "0-1":
            call.end(remote_error("no memory"))
        else:
            call.answer()

    sampler, buffer = sampler_of({"a": Worker(behave)})
    with caplog.at_level(logging.WARNING):
        assert take(sampler) == ["0-0", "0-2", "0-3", "0-4"]
    assert buffer.dropped == {("failed", "task"): 1}
    assert "0-1" in caplog.text
    assert "no memory" in caplog.text


def test_a_group_of_which_a_sample_was_aborted_is_replaced():
    worker = Worker(lambda call: call.answer(reason="abort" if call.uid == "0-0" else "stop"))
    sampler, buffer = sampler_of({"a": worker})
    assert take(sampler) == ["0-1", "0-2", "0-3", "0-4"]
    assert buffer.dropped == {("aborted", "task"): 1}


def test_when_everything_fails_the_last_failure_is_the_runs():
    worker = Worker(lambda call: call.end(remote_error(f"broken for {call.uid}")))
    sampler, _ = sampler_of({"a": worker}, most_failures=5)
    with pytest.raises(RemoteError, match="broken for 0-4"):
        take(sampler)
    assert len(worker.calls) == 8, "4 at first; those that take the places of the failed ones are not looked at"


def test_p11_a_task_that_never_returns_is_named_and_sampled_elsewhere(caplog):
    def behave(call):
        if call.uid != "0-3":
            call.answer()

    silent, other = Worker(behave), Worker()
    # least in flight: a, b, a, b, …; of the 16 tasks a has the even ones and b the odd ones
    sampler, buffer = sampler_of({"a": other, "b": silent}, timeout_s=0.05)
    with caplog.at_level(logging.WARNING):
        uids = take(sampler, count=16, limit=16)
    assert sorted(uids) == sorted(f"0-{number}" for number in range(16))
    assert "prompt 0-3 on replica b has not been sampled within trainer.v1.sampler.task_timeout_s=0.05" in caplog.text
    asked = [call for call in silent.calls if call.uid == "0-3"]
    assert [call.cancelled for call in asked] == [True]
    assert [call.uid for call in other.calls].count("0-3") == 1
    assert buffer.dropped == {}


def test_a_reply_that_comes_after_its_deadline_changes_nothing():
    calls = []

    def behave(call):
        calls.append(call)
        if len(calls) != 1:
            call.answer()

    sampler, _ = sampler_of({"a": Worker(behave)}, timeout_s=0.05)
    uids = take(sampler, count=1, limit=1)
    calls[0].answer()
    assert uids == ["0-0"]
    assert take(sampler, count=1, limit=2) == ["0-1"]


def test_a_task_that_is_late_twice_is_dropped_and_late_tasks_alone_end_the_run():
    sampler, buffer = sampler_of({"a": Worker(None)}, timeout_s=0.02, most_failures=2)
    with pytest.raises(
        RpcrlError, match=r"prompt 0-\d+ was not sampled within .* in 2 attempts, the last on replica a"
    ):
        take(sampler, count=2, limit=2)
    assert buffer.dropped[("late", "task")] == 2


def test_paused_tasks_are_not_late():
    worker = Worker(None)
    sampler, _ = sampler_of({"a": worker}, timeout_s=60.0)
    sampler.fill(1, version=0)
    before = [task.begun_s for task in sampler._tasks.values()]
    sampler.restart_deadlines()
    assert [task.begun_s for task in sampler._tasks.values()] >= before


def test_the_requests_of_a_lost_replica_are_issued_again_on_the_others():
    held = Worker(None)
    sampler, buffer = sampler_of(Restartable({"a": held, "b": Worker()}))
    sampler.fill(4, version=0)
    for call in held.calls:
        call.end(lost())
    assert sorted(take(sampler)) == ["0-0", "0-1", "0-2", "0-3"]
    assert buffer.dropped == {}


def test_with_the_last_replica_lost_the_next_one_is_waited_for():
    replicas = Restartable({"a": Worker(lambda call: call.end(lost()))})
    sampler, _ = sampler_of(replicas)
    assert sorted(take(sampler)) == ["0-0", "0-1", "0-2", "0-3"]
    assert replicas.waits >= 1


def test_a_replica_that_cannot_be_spared_ends_the_run():
    class Group:
        workers = ()

    replicas = FixedReplicas(Group())
    with pytest.raises(WorkerLostError):
        replicas.lost("rollout 0", lost())


def test_stale_groups_are_dropped_and_replaced_by_strategy_drop():
    worker = Worker(None)
    sampler, buffer = sampler_of({"a": worker}, strategy="drop", max_staleness=1)
    sampler.fill(2, version=0)
    for call in worker.calls:
        call.answer(version=0)
    worker.behave = lambda call: call.answer(version=3)
    assert take(sampler, count=2, version=3, limit=2) == ["0-2", "0-3"]
    assert buffer.dropped == {("stale", "task"): 2}


def test_closing_gives_up_what_is_in_flight():
    worker = Worker(None)
    sampler, _ = sampler_of({"a": worker})
    sampler.fill(3, version=0)
    sampler.close()
    assert all(call.cancelled for call in worker.calls)


def test_prompts_of_a_loader_are_found_again_by_their_uids(tmp_path):
    from rpcrl.config.load import load
    from rpcrl.engines.hf_model import load_tokenizer
    from rpcrl.errors import CheckpointError
    from rpcrl.trainer.sources import open_prompts, open_training

    config = load(None, [], "colocate")
    tokenizer = load_tokenizer(str(base_checkpoint()))
    loader = open_training(config, open_prompts(config, heldout_needed=False), tokenizer)
    batch = loader.next_batch()
    state = loader.state()
    uids = [str(batch.non_tensor_batch["uid"][row]) for row in (7, 2)]
    again = loader.prompts(uids)
    assert list(again.non_tensor_batch["uid"]) == uids
    assert again.batch["input_ids"].tolist() == batch.batch["input_ids"][[7, 2]].tolist()
    assert loader.state() == state
    with pytest.raises(CheckpointError, match="heldout-1"):
        loader.prompts(["heldout-1"])


class OnlyEven:
    """Keeps prompts with even numbers, and adds what a filter adds."""

    def kept(self, rows):
        number = int(str(rows.non_tensor_batch["uid"][0]).partition("-")[2])
        if number % 2:
            return None
        rows.non_tensor_batch["score"] = rows.non_tensor_batch["uid"].copy()
        return rows

    def exhausted(self, filtered):
        return BatchError(f"{filtered} were filtered")


def test_a_group_that_is_filtered_is_replaced_and_counted_as_dropped():
    sampler, buffer = sampler_of({"a": Worker()}, group_filter=OnlyEven(), most_filtered=4)
    sampler.fill(4, version=0)
    batch = sampler.take(4, version=0, later=0, limit=4)
    assert [str(uid) for uid in batch.non_tensor_batch["score"][::2]] == ["0-0", "0-2", "0-4", "0-6"]
    assert buffer.dropped == {("filtered", "task"): 3}
    assert sampler.num_filtered == 3
    sampler.begin_step()
    assert sampler.num_filtered == 0


def test_a_step_that_loses_too_many_groups_to_the_filter_ends_the_run():
    sampler, _ = sampler_of({"a": Worker()}, group_filter=OnlyEven(), most_filtered=2)
    sampler.fill(4, version=0)
    with pytest.raises(BatchError, match="3 were filtered"):
        sampler.take(4, version=0, later=0, limit=4)
