"""Who samples when replicas come and go? Groups, syncs and starts are written out here; no process runs."""

import threading

import pytest

from rpcrl.errors import RpcrlError, StartError, WeightSyncError, WorkerExit, WorkerLostError
from rpcrl.testing.engine_kit import make_prompts
from rpcrl.trainer import replicas as module
from rpcrl.trainer.replicas import ReplicaSet, ReplicaSync


def lost(group_name):
    return WorkerLostError(
        [WorkerExit(f"{group_name}.0", group_name, 0, ("rollout",), "here", 1, None, "SIGKILL", 7, False, (), "")]
    )


class Done:
    def __init__(self, value):
        self.value = value

    def result(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Method:
    def __init__(self, call):
        self.call = call

    def submit(self, *args):
        try:
            return Done(self.call(*args))
        except RpcrlError as error:
            return Done(error)


class Group:
    """A replica; ``dead`` makes every call of it fail as the calls of a lost worker do."""

    world_size = 1

    def __init__(self, name):
        self.name = name
        self.workers = (f"worker of {name}",)
        self.dead = False
        self.closed = False
        self.calls = []
        for method in ("pause_generation", "resume_generation", "generate_sequences"):
            setattr(self, method, Method(lambda *args, method=method: self._call(method, *args)))

    def _call(self, method, *args):
        if self.dead:
            raise lost(self.name)
        self.calls.append(method)
        return args[0] if args else 0

    def close(self):
        self.closed = True
        return [f"end of {self.name}"]


class Sync:
    def __init__(self, group):
        self.group = group
        self.versions = []
        self.closed = False

    def update_weights(self, version):
        if self.group.dead:
            raise lost(self.group.name)
        self.versions.append(version)

    def close(self):
        self.closed = True


class Site:
    """Makes replicas a, b, …, and their successors; ``gate`` holds starts back, ``failures`` lets some of them fail."""

    def __init__(self, count):
        self.gate = threading.Event()
        self.gate.set()
        self.failures = 0
        self.started = 0
        self.syncs = {}
        self.groups = [Group(f"replica-{index}") for index in range(count)]
        self.set = ReplicaSet(self.groups, self.start, self.sync_to)

    def start(self, index):
        assert self.gate.wait(60)
        self.started += 1
        if self.failures:
            self.failures -= 1
            raise StartError("no memory")
        return Group(f"replica-{index} again {self.started}")

    def sync_to(self, group):
        self.syncs[group.name] = Sync(group)
        return self.syncs[group.name]


@pytest.fixture
def site():
    made = Site(2)
    yield made
    made.gate.set()
    made.set.close()


def test_replicas_take_tasks_once_they_have_weights(site):
    assert site.set.live() == {}
    ReplicaSync(site.set).update_weights(4)
    assert site.set.live() == {f"replica-{index}": f"worker of replica-{index}" for index in range(2)}
    assert [sync.versions for sync in site.syncs.values()] == [[4], [4]]
    assert site.set.world_size == 2


def test_a_lost_replica_is_left_out_and_its_successor_has_the_next_weights(site):
    site.set.update_weights(1)
    site.gate.clear()
    site.groups[0].dead = True
    site.set.lost("replica-0", lost("replica-0"))
    site.set.lost("replica-0", lost("replica-0"))
    assert site.set.num_lost == 1, "all its calls fail; it is lost once"
    assert list(site.set.live()) == ["replica-1"]
    site.set.update_weights(2)
    assert list(site.set.live()) == ["replica-1"], "the run does not wait for the successor"
    site.gate.set()
    site.set._places[0].starting.result(60)
    site.set.update_weights(3)
    assert list(site.set.live()) == ["replica-0 again 1", "replica-1"]
    assert site.syncs["replica-0 again 1"].versions == [3]
    assert site.syncs["replica-0"].closed
    assert site.groups[0].closed
    assert "end of replica-0" in site.set.close()


def test_without_a_replica_its_successor_is_waited_for_and_gets_current_weights_at_once():
    site = Site(1)
    site.set.update_weights(5)
    site.set.lost("replica-0", lost("replica-0"))
    assert site.set.live() == {}
    site.set.await_one()
    assert list(site.set.live()) == ["replica-0 again 1"]
    assert site.syncs["replica-0 again 1"].versions == [5]
    site.set.close()


def test_a_replica_that_dies_in_a_sync_costs_nothing_but_itself(site):
    site.groups[1].dead = True
    site.set.update_weights(1)
    assert list(site.set.live()) == ["replica-0"]
    assert site.set.num_lost == 1


def test_a_sync_that_fails_by_the_trainer_ends_the_run(site):
    def trainer_died(version):
        raise lost("trainer")

    site.syncs["replica-0"].update_weights = trainer_died
    with pytest.raises(WorkerLostError):
        site.set.update_weights(1)

    def refused(version):
        raise WeightSyncError("another shape")

    site.syncs["replica-0"].update_weights = refused
    with pytest.raises(WeightSyncError, match="another shape"):
        site.set.update_weights(1)


def test_a_replica_that_dies_again_and_again_ends_the_run_unless_it_does_tasks_in_between():
    site = Site(1)
    site.set.update_weights(1)
    for _ in range(3 * module.MOST_DEATHS):
        (name,) = site.set.live()
        site.set.served(name)
        site.set.lost(name, lost(name))
        site.set.await_one()
    for _ in range(module.MOST_DEATHS - 1):
        (name,) = site.set.live()
        site.set.lost(name, lost(name))
        site.set.await_one()
    (name,) = site.set.live()
    with pytest.raises(WorkerLostError, match="SIGKILL"):
        site.set.lost(name, lost(name))
    site.set.close()


def test_a_start_that_fails_is_tried_again_and_not_for_ever():
    site = Site(1)
    site.set.update_weights(1)
    site.failures = 1
    site.set.lost("replica-0", lost("replica-0"))
    site.set.await_one()
    assert site.started == 2
    site.failures = 9
    (name,) = site.set.live()
    site.set.served(name)
    site.set.lost(name, lost(name))
    with pytest.raises(StartError, match="no memory"):
        site.set.await_one()
    site.set.close()


def test_pausing_reaches_all_and_a_death_meanwhile_is_noticed(site):
    site.set.update_weights(1)
    site.set.pause_generation()
    assert [group.calls for group in site.groups] == [["pause_generation"]] * 2
    site.groups[0].dead = True
    site.set.resume_generation()
    assert list(site.set.live()) == ["replica-1"]


def test_a_batch_is_sampled_by_all_and_what_a_lost_one_leaves_by_the_others(site):
    site.set.update_weights(1)
    prompts = make_prompts(groups=5, n=1)
    assert list(site.set.generate_sequences(prompts).non_tensor_batch["uid"]) == list(prompts.non_tensor_batch["uid"])
    assert [group.calls for group in site.groups] == [["generate_sequences"]] * 2
    site.groups[1].dead = True
    again = site.set.generate_sequences(prompts)
    assert list(again.non_tensor_batch["uid"]) == list(prompts.non_tensor_batch["uid"])
    assert site.set.num_lost == 1
    one = make_prompts(groups=1, n=1)
    assert len(site.set.generate_sequences(one)) == 1


def test_closing_ends_successors_that_are_on_their_way(site):
    site.set.update_weights(1)
    site.set.lost("replica-0", lost("replica-0"))
    ends = site.set.close()
    assert set(ends) >= {"end of replica-0", "end of replica-1", "end of replica-0 again 1"}
    ReplicaSync(site.set).close()
    assert site.syncs["replica-1"].closed
