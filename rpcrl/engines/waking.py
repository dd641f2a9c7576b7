"""In which order does a rollout come back after the trainer has had its memory, and what if it cannot?

Weights first, then their new content, then the cache: the old content and a cache that is not needed yet never stand in
memory beside the new. What fails on the way leaves the rollout as asleep as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rpcrl.engines.base import NamedTensors

if TYPE_CHECKING:
    from rpcrl.engines.base import RolloutEngine

__all__ = ["TAGS", "take_weights"]

TAGS = ("weights", "kv_cache")


def take_weights(
    engine: RolloutEngine,
    buckets: Iterable[NamedTensors],
    *,
    version: int,
    then: Callable[[], None] | None = None,
) -> int:
    """Wake what is asleep and give the engine new weights; returns the version that samples now.

    ``then`` is called when the engine is awake, to look at what it has become. When any step raises, what was asleep
    before sleeps again, and the error goes on.
    """
    asleep = [tag for tag in TAGS if tag not in engine.awake]
    try:
        if "weights" in asleep:
            engine.wake_up(["weights"])
        engine.update_weights(buckets, version=version)
        if "kv_cache" in asleep:
            engine.wake_up(["kv_cache"])
        if then is not None:
            then()
    except BaseException as error:
        _back_to_sleep(engine, asleep, error)
        raise
    return engine.weight_version


def _back_to_sleep(engine: RolloutEngine, asleep: list[str], error: BaseException) -> None:
    woken = [tag for tag in asleep if tag in engine.awake]
    if not woken:
        return
    try:
        engine.sleep(woken)
    except Exception as second:
        error.add_note(
            f"and the rollout could not go back to sleep: {type(second).__name__}: {second}; {' and '.join(woken)} "
            "still hold their memory"
        )
