"""What is left without the plugin: everything checks, and methods of groups are of any type."""

from __future__ import annotations

from typing import reveal_type

from rpcrl import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register


class Scorer(Worker):
    @register(Dispatch.RANK_ZERO, blocking=False)
    def add(self, x: int) -> int:
        return x


def use(pool: ResourcePool, scorer: Scorer) -> None:
    group = WorkerGroup(pool, Scorer)
    reveal_type(group)  # R: WorkerGroup[Scorer]
    reveal_type(group.scor("misspelt"))  # R: Any
    reveal_type(group.add("not checked"))  # R: Any
    reveal_type(group.add.submit(1))  # R: Future[Any]
    reveal_type(scorer.add)  # R: def (x: int) -> int
    both = WorkerGroup(pool, {"a": Scorer, "b": ClassWithInitArgs(Scorer)})
    reveal_type(both.spawn())  # R: dict[str, WorkerGroup[Any]]
    reveal_type(both.spawn()["a"].add(1))  # R: Any
    scorer.add("one")  # E: Argument 1 to "add" of "Scorer" has incompatible type "str"; expected "int"
