"""What a driver sees of a group; ``# R:`` is a revealed type, ``# E:`` an error of that line."""

from __future__ import annotations

from typing import Any, reveal_type

from rpcrl import ClassWithInitArgs, DataProto, ResourcePool, WorkerGroup
from tests.typing.samples.workers import Scorer, Store, TextStore


def results(pool: ResourcePool, batch: DataProto) -> None:
    group = WorkerGroup(pool, Scorer, 2.0, name="scorer")
    reveal_type(group)  # R: WorkerGroup[Scorer]
    reveal_type(group.add(1, y=2))  # R: list[int]
    reveal_type(group.say("x"))  # R: list[None]
    reveal_type(group.each([1, 2], name=("a", "b")))  # R: list[str]
    reveal_type(group.to_each([b"a"]))  # R: list[bytes]
    reveal_type(group.metrics(batch))  # R: list[dict[str, float]]
    reveal_type(group.figures(batch))  # R: dict[str, float]
    reveal_type(group.listed())  # R: Any
    reveal_type(group.tokens(batch))  # R: int
    reveal_type(group.merged(batch))  # R: Any
    reveal_type(group.mean(batch))  # R: dict[str, float]
    reveal_type(group.unmerged(batch))  # R: list[int]
    reveal_type(group.score(batch))  # R: DataProto
    reveal_type(group.apply(keep, batch))  # R: DataProto
    reveal_type(group.over_mesh(batch=batch))  # R: DataProto
    reveal_type(group.first(1))  # R: str
    reveal_type(group.first_by_name(1))  # R: str
    reveal_type(group.first_by_execution([1, 2]))  # R: int
    reveal_type(group.later(1))  # R: Future[list[int]]
    reveal_type(group.later(1).result(timeout_s=1.0))  # R: list[int]
    reveal_type(group.score_later(batch))  # R: Future[DataProto]
    reveal_type(group.generate("x"))  # R: list[list[int]]
    reveal_type(group.generate_one("x"))  # R: bytes
    reveal_type(group.custom("of any type"))  # R: Any
    reveal_type(group.same(1))  # R: list[Any]
    reveal_type(group.anything(1, 2, a="b"))  # R: list[Any]
    reveal_type(group.add.submit(1))  # R: Future[list[int]]
    reveal_type(group.score.submit(batch))  # R: Future[DataProto]
    reveal_type(group.score_later.submit(batch))  # R: Future[DataProto]
    reveal_type(group.generate_one.submit("x"))  # R: Future[bytes]
    reveal_type(group.world_size)  # R: int
    with group as same:
        reveal_type(same)  # R: WorkerGroup[Scorer]


def keep(batch: DataProto) -> DataProto:
    return batch


def mistakes(pool: ResourcePool, batch: DataProto) -> None:
    group = WorkerGroup(pool, Scorer, 2.0)
    group.add("one")  # E: incompatible type "str"; expected "int | Future[int]"
    group.add(1, z=2)  # E: Unexpected keyword argument "z" for "__call__" of "RemoteMethod"
    group.add()  # E: Missing positional argument "x" in call to "__call__"
    group.add.submit(1, 2)  # E: Too many positional arguments for "submit" of "RemoteMethod"
    group.each(1, ["a"])  # E: incompatible type "int"; expected "list[int] | tuple[int, ...] | Future[list[int]] |
    group.score([1])  # E: incompatible type "list[int]"; expected "DataProto | BatchRef | Future
    group.custom()  # E: Missing positional argument "x"
    group.scor(batch)  # E: "Scorer" has no registered method "scor"; maybe "score"?
    group.nothing_like_it()  # E: "Scorer" has no registered method "nothing_like_it"
    group.helper(1)  # E: "Scorer.helper" is not registered: mark it with @register to call it on a group
    print(group.factor)  # E: "Scorer.factor" is not registered
    text: str = group.add(1)  # E: Incompatible types in assignment
    group.score(batch).result()  # E: "DataProto" has no attribute "result"
    print(text)


def references_and_futures(pool: ResourcePool, batch: DataProto) -> None:
    group = WorkerGroup(pool, Scorer, 2.0)
    reveal_type(group.kept(batch))  # R: BatchRef
    reveal_type(group.kept_by_each())  # R: list[BatchRef]
    reveal_type(group.score(group.kept(batch)))  # R: DataProto
    reveal_type(group.score(group.kept.submit(batch)))  # R: DataProto
    reveal_type(group.score.submit(group.score_later(batch)))  # R: Future[DataProto]
    reveal_type(group.first_by_execution(group.add.submit(1)))  # R: int
    reveal_type(group.each(group.add.submit(1)))  # R: list[str]
    group.add(group.score.submit(batch))  # E: incompatible type "Future[DataProto]"; expected "int | Future[int]"
    group.first(group.kept(batch))  # E: incompatible type "BatchRef"; expected "int | Future[int]"


def single_workers(pool: ResourcePool, batch: DataProto) -> None:
    group = WorkerGroup(pool, Scorer, 2.0)
    worker = group.workers[1]
    reveal_type(worker)  # R: WorkerHandle[Scorer]
    reveal_type(worker.add(1))  # R: int
    reveal_type(worker.each(1, name="a"))  # R: str
    reveal_type(worker.custom(1))  # R: int
    reveal_type(worker.later(1))  # R: Future[int]
    reveal_type(worker.kept.submit(batch))  # R: Future[BatchRef]
    reveal_type(group.balance(group, worker))  # R: list[int]
    reveal_type(worker.rank)  # R: int
    worker.scor(batch)  # E: "Scorer" has no registered method "scor"; maybe "score"?
    group.balance(worker, worker)  # E: incompatible type "WorkerHandle[Scorer]"; expected "WorkerGroup[Scorer] | Fut


async def awaited(pool: ResourcePool, batch: DataProto) -> None:
    group = WorkerGroup(pool, ClassWithInitArgs(Scorer, 2.0))
    reveal_type(group)  # R: WorkerGroup[Scorer]
    reveal_type(await group.add.submit(1))  # R: list[int]
    reveal_type(await group.score_later(batch))  # R: DataProto


def inherited(text: WorkerGroup[TextStore], number: WorkerGroup[Store[int]]) -> None:
    reveal_type(text.get())  # R: str
    reveal_type(text.put("x"))  # R: list[None]
    reveal_type(number.get())  # R: int
    number.put("x")  # E: incompatible type "str"; expected "int | Future[int]"


def several_roles(pool: ResourcePool) -> None:
    group = WorkerGroup(pool, {"scorer": ClassWithInitArgs(Scorer, factor=1.0), "store": TextStore}, name="both")
    views = group.spawn()
    reveal_type(views["scorer"])  # R: WorkerGroup[Scorer]
    reveal_type(views["scorer"].first(1))  # R: str
    reveal_type(views["store"].get())  # R: str
    group.get()  # E: the group hosts several roles (scorer, store): take a view first
    print(views["scorre"])  # E: "scorre" is not a valid TypedDict key; expected one of ("scorer", "store")
    views["store"].gett()  # E: "TextStore" has no registered method "gett"; maybe "get"?
    reveal_type(group.spawn({"store"})["store"].get())  # R: str
    print(group.spawn({"store"})["scorer"])  # E: "scorer" is not a valid TypedDict key
    reveal_type(group.spawn(sorted(views)))  # R: dict[str, WorkerGroup[Any]]
    one = WorkerGroup(pool, TextStore)
    reveal_type(one.spawn())  # R: dict[str, WorkerGroup[TextStore]]
    role = "scorer" if one else "store"
    unknown = WorkerGroup(pool, {role: Scorer})
    reveal_type(unknown.spawn()[role].anything_at_all(1))  # R: Any
    WorkerGroup(pool, 3)  # E: No overload variant of "WorkerGroup" matches


def untyped(group: WorkerGroup[Any]) -> None:
    reveal_type(group.whatever(1, x=2))  # R: Any


class OwnGroup(WorkerGroup[Scorer]):
    def twice(self, x: int) -> list[int]:
        return [2 * value for value in self.add(x)]


def derived(pool: ResourcePool) -> None:
    group = OwnGroup(pool, Scorer, 1.0)
    reveal_type(group.twice(1))  # R: list[int]
    reveal_type(group.first(1))  # R: str
    group.twicee(1)  # E: "Scorer" has no registered method "twicee"
