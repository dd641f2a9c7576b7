"""A rollout takes its memory back in order, and a step that fails puts it back to sleep; with a budget of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from rpcrl.engines.waking import take_weights
from rpcrl.errors import UsageError

SIZES = {"weights": 60, "kv_cache": 40}


class BudgetEngine:
    """Counts the bytes of a device with a trainer beside it; step ``fails_at`` of a wake-up raises."""

    def __init__(self, budget: int = 100, fails_at: int = 0) -> None:
        self.free = budget
        self.held: set[str] = set()
        self.weight_version = 3
        self.log: list[str] = []
        self._fails_at = fails_at
        self._steps = 0

    @property
    def awake(self) -> frozenset[str]:
        return frozenset(self.held)

    def _step(self, what: str) -> None:
        self.log.append(what)
        self._steps += 1
        if self._steps == self._fails_at:
            raise MemoryError(f"no memory for step {self._steps} ({what})")

    def wake_up(self, tags: Sequence[str]) -> None:
        for tag in tags:
            self._step(f"wake {tag}")
            if self.free < SIZES[tag]:
                raise MemoryError(f"{tag} needs {SIZES[tag]} bytes, {self.free} are free")
            self.free -= SIZES[tag]
            self.held.add(tag)

    def update_weights(self, buckets: Iterable[object], *, version: int) -> None:
        for _ in buckets:
            self._step("bucket")
        if "weights" not in self.held:
            raise UsageError("asleep")
        self.weight_version = version

    def sleep(self, tags: Sequence[str]) -> int:
        for tag in tags:
            self.held.remove(tag)
            self.free += SIZES[tag]
        self.log.append(f"sleep {', '.join(tags)}")
        return sum(SIZES[tag] for tag in tags)


def test_weights_come_first_then_their_content_then_the_cache() -> None:
    engine = BudgetEngine()
    seen = []
    assert take_weights(engine, [[], []], version=4, then=lambda: seen.append(engine.awake)) == 4
    assert engine.log == ["wake weights", "bucket", "bucket", "wake kv_cache"]
    assert seen == [{"weights", "kv_cache"}], "it is looked at when it can sample"


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_p88_a_failure_at_any_step_goes_back_to_sleep(step: int) -> None:
    engine = BudgetEngine(fails_at=step)
    with pytest.raises(MemoryError, match=f"step {step}"):
        take_weights(engine, [[], []], version=4)
    assert engine.free == 100, "every byte is back"
    assert not engine.awake
    assert take_weights(engine, [[]], version=5) == 5, "and it can be tried again"


def test_what_the_look_refuses_goes_back_to_sleep_too() -> None:
    engine = BudgetEngine()

    def refuse() -> None:
        raise UsageError("the canary differs")

    with pytest.raises(UsageError, match="the canary differs"):
        take_weights(engine, [[]], version=4, then=refuse)
    assert engine.free == 100


def test_p88_a_cache_that_does_not_fit_gives_the_weights_back() -> None:
    engine = BudgetEngine(budget=90)
    with pytest.raises(MemoryError, match="kv_cache needs 40 bytes, 30 are free"):
        take_weights(engine, [[]], version=4)
    assert engine.free == 90


def test_an_engine_that_was_awake_stays_awake() -> None:
    engine = BudgetEngine()
    engine.wake_up(["weights", "kv_cache"])
    engine._fails_at = 3
    with pytest.raises(MemoryError):
        take_weights(engine, [[]], version=4)
    assert engine.awake == {"weights", "kv_cache"}
    assert not any(line.startswith("sleep") for line in engine.log)


def test_a_rollout_that_cannot_go_back_to_sleep_says_so_beside_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = BudgetEngine(fails_at=3)

    def stuck(tags: Sequence[str]) -> int:
        raise RuntimeError("the device hangs")

    monkeypatch.setattr(engine, "sleep", stuck)
    with pytest.raises(MemoryError) as caught:
        take_weights(engine, [[]], version=4)
    assert caught.value.__notes__ == [
        "and the rollout could not go back to sleep: RuntimeError: the device hangs; weights still hold their memory"
    ]
