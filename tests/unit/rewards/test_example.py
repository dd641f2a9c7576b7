"""The example of a reward of one's own works as it says."""

from __future__ import annotations

from pathlib import Path

from rpcrl.rewards import load_reward

EXAMPLE = Path(__file__).parents[3] / "examples" / "length_reward.py"


def test_the_example_loads_and_scores() -> None:
    reward = load_reward(f"{EXAMPLE}:score", {"target_words": 2})
    assert reward.function("d", "one two", None, {}, **reward.kwargs) == {"score": 1.0, "num_words": 2.0}
    assert reward.function("d", "one", None, {}, **reward.kwargs) == {"score": 0.5, "num_words": 1.0}


def test_the_example_for_whole_batches_is_declared_as_one() -> None:
    reward = load_reward(f"{EXAMPLE}:shortest_half")
    assert reward.per_batch
    assert reward.function(["d"] * 4, ["a", "a b", "a b c", "a b c d"], [None] * 4, [{}] * 4) == [1.0, 1.0, 0.0, 0.0]
