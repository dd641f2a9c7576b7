"""What a worker class sees of its own registered methods, and which registrations are wrong."""

from __future__ import annotations

from typing import reveal_type

from rpcrl import DataProto, Dispatch, Worker, register
from tests.typing.samples.workers import Scorer


def in_the_worker(scorer: Scorer) -> None:
    """``@register`` leaves a function's type as it is."""
    reveal_type(scorer.add)  # R: def (x: int, *, y: int =) -> int
    reveal_type(scorer.score(DataProto()))  # R: DataProto
    reveal_type(Scorer.add)  # R: def (self: Scorer, x: int, *, y: int =) -> int
    reveal_type(Scorer.same)  # R: def [T] (self: Scorer, x: T) -> T
    reveal_type(Scorer.add.__name__)  # R: str
    scorer.add("one")  # E: Argument 1 to "add" of "Scorer" has incompatible type "str"; expected "int"


class Quick(Scorer):
    @register
    def add(self, x: int, *, y: int = 1) -> int:
        return super().add(x, y=y)

    @register(Dispatch.RANK_ZERO)
    def say(self, words: int) -> None: ...  # E: Argument 1 of "say" is incompatible with supertype


class Wrong(Worker):
    @register(Dispatch.DP_COMPUT)  # E: "type[Dispatch]" has no attribute "DP_COMPUT"
    @register(uneven="paad")  # E: No overload variant of "register" matches argument type "str"
    def twice(self) -> None: ...
