"""Is the noise keyed, even and independent, and does a draw follow it?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rpcrl.engines.sampling import SamplingSettings, draw, filter_logits, noise_keys, uid_hash, uniforms
from rpcrl.errors import UsageError


def keys(count: int = 4096, seed: int = 0, step: int = 0, uid: str = "p") -> np.ndarray:
    return noise_keys(seed, step, [uid] * count, list(range(count)))


def test_hashes_are_the_same_everywhere() -> None:
    assert uid_hash("prompt-0") == 2873303100735313375
    key = noise_keys(1, 2, ["a", "b", "a"], [0, 0, 1])
    assert key.tolist() == noise_keys(1, 2, np.array(["a", "b", "a"], dtype=object), np.array([0, 0, 1])).tolist()
    assert uniforms(key, 5)[0] == uniforms(key[:1], 5)[0]
    # Frozen: another value means that a resumed or repeated run samples other tokens than before.
    assert float(uniforms(noise_keys(1, 2, ["a"], [3]), 4)[0]) == 0.3557043416353334


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}, {"uid": "q"}, {"seed": -1}, {"seed": 2**70 + 3}])
def test_each_part_of_the_key_gives_other_noise(other: dict[str, object]) -> None:
    first, second = uniforms(keys(), 0), uniforms(keys(**other), 0)
    assert not (first == second).any()
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(4096)


def test_noise_is_even_over_samples_and_positions() -> None:
    table = np.stack([uniforms(keys(), position) for position in range(32)])
    assert table.min() >= 0.0
    assert table.max() < 1.0
    counts, _ = np.histogram(table, bins=64, range=(0, 1))
    expected = table.size / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 63 + 5 * np.sqrt(2 * 63)
    for one, two in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:])):
        assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 5 / np.sqrt(one.size)
    assert len(np.unique(table)) == table.size


def test_a_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 0.0, 0.0, float("-inf")]]).log_softmax(-1)
    below = 1.0 - 2.0**-52
    cases = {0.0: 0, 0.3: 0, 0.4: 2, 0.7: 3, below: 3}
    noise = torch.tensor(list(cases), dtype=torch.float64)
    tokens, log_probs = draw(logits.expand(len(cases), -1).contiguous(), SamplingSettings(), noise)
    assert tokens.tolist() == list(cases.values())
    assert log_probs.tolist() == pytest.approx([np.log(1 / 3)] * len(cases))


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((1, 50), float("-inf"))
    logits[0, 7] = 3.0
    noise = torch.tensor([0.0, 0.5, 1.0 - 2.0**-52], dtype=torch.float64)
    tokens, log_probs = draw(logits.expand(3, -1).contiguous(), SamplingSettings(), noise)
    assert tokens.tolist() == [7, 7, 7]
    assert log_probs.tolist() == [0.0, 0.0, 0.0]


def test_filters_keep_at_least_one_token_and_break_ties_the_same_way() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    kept = lambda **settings: (filter_logits(logits, SamplingSettings(**settings)) > -1e9)[0].tolist()  # noqa: E731
    assert kept(top_k=2) == [False, True, True, False, False]
    assert kept(top_p=1e-9) == [False, True, False, False, False]
    assert kept(top_k=99, top_p=1.0) == [True] * 5


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="do_sample=False"):
        SamplingSettings(temperature=0.0)
    with pytest.raises(UsageError, match="top_p=0"):
        SamplingSettings(top_p=0.0)
    with pytest.raises(UsageError, match="top_k=-2"):
        SamplingSettings(top_k=-2)
