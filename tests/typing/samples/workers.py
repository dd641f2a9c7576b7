"""Worker classes; another sample calls them through groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rpcrl import DataProto, Dispatch, Execute, Worker, WorkerGroup, mesh, register
from rpcrl.runtime.worker_group import WorkerHandle

T = TypeVar("T")
ZERO = Dispatch.RANK_ZERO


class Scorer(Worker):
    def __init__(self, factor: float) -> None:
        self.factor = factor

    @register
    def add(self, x: int, *, y: int = 0) -> int:
        return x + y

    @register(Dispatch.ONE_TO_ALL)
    def say(self, text: str) -> None: ...

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def each(self, x: int, name: str = "") -> str:
        return name * x

    @register(Dispatch.ALL_TO_ALL)
    def to_each(self, x: bytes) -> bytes:
        return x

    @register(Dispatch.DP_COMPUTE_METRIC)
    def metrics(self, batch: DataProto) -> dict[str, float]:
        return {"rows": len(batch)}

    @register(Dispatch.DP_COMPUTE_METRIC, merge={"rows": "sum"})
    def figures(self, batch: DataProto) -> dict[str, float]:
        return {"rows": len(batch)}

    @register(merge="list")
    def listed(self) -> int:
        return 1

    @register(Dispatch.DP_COMPUTE_METRIC, merge="sum")
    def tokens(self, batch: DataProto) -> int:
        return len(batch)

    @register(Dispatch.DP_COMPUTE_METRIC, merge={"loss": "mean"})
    def merged(self, batch: DataProto) -> dict[str, int]:
        return {"loss": len(batch)}

    @register(Dispatch.DP_COMPUTE_METRIC, merge={"loss": "mean", "tokens": "sum"})
    def mean(self, batch: DataProto) -> dict[str, float]:
        return {"loss": 0.0, "tokens": 0.0}

    @register(Dispatch.DP_COMPUTE_METRIC, merge=None)
    def unmerged(self, batch: DataProto) -> int:
        return len(batch)

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="uneven")
    def score(self, batch: DataProto) -> DataProto:
        return batch

    @register(Dispatch.DP_COMPUTE_PROTO, returns="ref")
    def kept(self, batch: DataProto) -> DataProto:
        return batch

    @register(returns="ref")
    def kept_by_each(self) -> DataProto:
        return DataProto()

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Callable[[DataProto], DataProto], batch: DataProto) -> DataProto:
        return function(batch)

    @register(mesh("tp"))
    def over_mesh(self, *, batch: DataProto) -> DataProto:
        return batch

    @register
    def balance(self, peers: WorkerGroup[Scorer], first: WorkerHandle[Scorer]) -> int:
        return first.add(sum(peers.add(1)))

    @register(Dispatch.RANK_ZERO)
    def first(self, x: int) -> str:
        return str(x)

    @register(ZERO)
    def first_by_name(self, x: int) -> str:
        return str(x)

    @register(Dispatch.ALL_TO_ALL, Execute.RANK_ZERO)
    def first_by_execution(self, x: list[int]) -> int:
        return len(x)

    @register(blocking=False)
    def later(self, x: int) -> int:
        return x

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def score_later(self, batch: DataProto) -> DataProto:
        return batch

    @register
    async def generate(self, prompt: str) -> list[int]:
        return [ord(letter) for letter in prompt]

    @register(Dispatch.RANK_ZERO, concurrent=True)
    async def generate_one(self, prompt: str) -> bytes:
        return prompt.encode()

    @register({"dispatch_fn": print, "collect_fn": print})
    def custom(self, x: int) -> int:
        return x

    @register
    def same(self, x: T) -> T:
        return x

    @register
    def anything(self, *xs: int, **named: str) -> Any:
        return xs, named

    def helper(self, x: int) -> int:
        return self.add(x, y=1)


class Store(Worker, Generic[T]):
    @register(Dispatch.RANK_ZERO)
    def get(self) -> T:
        raise NotImplementedError

    @register
    def put(self, value: T) -> None: ...


class TextStore(Store[str]):
    @register(Dispatch.RANK_ZERO)
    def get(self) -> str:
        return ""
