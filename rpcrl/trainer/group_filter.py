"""Which groups teach nothing? DAPO's filter: a group whose samples all have the same value of the metric is replaced.

Its advantages would all be 0. Others are sampled in its place, so that each step trains on as many groups as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rpcrl.batch.data_proto import DataProto
from rpcrl.errors import BatchError

if TYPE_CHECKING:
    from rpcrl.config.run import FilterGroups

__all__ = ["GroupFilter", "differs", "filter_counts"]

SETTING = "algorithm.filter_groups"


def differs(batch: DataProto, metric: str) -> dict[str, bool]:
    """Return for each prompt (by ``uid``, in the batch's order) whether its samples differ in column ``metric``.

    A single sample has nothing to differ from and is kept. Raises BatchError when the scored rows have no such column,
    or one without numbers.
    """
    columns = batch.non_tensor_batch
    if metric not in columns:
        raise BatchError(
            f"{SETTING}.metric={metric}: the scored samples have no column of that name, only "
            f"{', '.join(sorted(columns))}; have the reward function return it, or set {SETTING}.metric=score"
        )
    values: dict[str, list[float]] = {}
    for uid, value in zip(columns["uid"], columns[metric], strict=True):
        try:
            values.setdefault(str(uid), []).append(float(value))
        except (TypeError, ValueError) as error:
            raise BatchError(
                f"{SETTING}.metric={metric}: the value {value!r} of prompt {uid} is not a number; "
                f"set {SETTING}.metric=score"
            ) from error
    return {uid: len(found) == 1 or min(found) != max(found) for uid, found in values.items()}


class GroupFilter:
    """Fills the batch of a step with groups that differ; ``counts`` says what that took."""

    def __init__(self, settings: FilterGroups, score: Callable[[DataProto], DataProto]) -> None:
        """``score`` adds the rewards to sampled rows."""
        self._settings = settings
        self._score = score
        self.counts: dict[str, float] = {}
        self.columns: set[str] = set()
        """Columns that scoring adds."""

    def fill(self, sample: Callable[[], DataProto], wanted: int) -> DataProto:
        """Call ``sample`` until ``wanted`` groups differ, and return their scored rows; the surplus is discarded.

        Raises BatchError after ``max_num_gen_batches`` calls.
        """
        kept: list[DataProto] = []
        found = sampled = batches = 0
        while found < wanted:
            if batches and batches == self._settings.max_num_gen_batches:
                raise self.exhausted(sampled - found)
            batch = self._scored(sample())
            batches += 1
            different = differs(batch, self._settings.metric)
            sampled += len(different)
            chosen = [uid for uid, keep in different.items() if keep]
            surplus = max(0, found + len(chosen) - wanted)
            chosen = chosen[: len(chosen) - surplus]
            found += len(chosen)
            kept.append(_rows_of(batch, chosen))
        self.counts = filter_counts(sampled - found - surplus, surplus, batches)
        return DataProto.concat([part for part in kept if len(part)])

    def exhausted(self, filtered: int) -> BatchError:
        """Return the error for a step that ``max_num_gen_batches`` batches of prompts could not fill."""
        bound, metric = self._settings.max_num_gen_batches, self._settings.metric
        return BatchError(
            f"the samples of {filtered} prompts of one step do not differ in {metric}, and "
            f"{SETTING}.max_num_gen_batches={bound} batches are not enough to fill it with others. Set it higher (0: "
            "no bound), take easier or harder prompts, or sample more per prompt (rollout.n)"
        )

    def kept(self, rows: DataProto) -> DataProto | None:
        """Return the scored rows of one group, or None if its samples do not differ."""
        scored = self._scored(rows)
        return scored if all(differs(scored, self._settings.metric).values()) else None

    def _scored(self, rows: DataProto) -> DataProto:
        scored = self._score(rows)
        self.columns |= set(scored.non_tensor_batch) - set(rows.non_tensor_batch)
        return scored


def filter_counts(evicted: int, surplus: int, batches: int | None = None) -> dict[str, float]:
    """Return the metrics of the filter; groups."""
    counts = {
        "training/filter_groups/evicted_samples": float(evicted),
        "training/filter_groups/discarded_surplus_samples": float(surplus),
    }
    return counts if batches is None else {**counts, "training/filter_groups/num_gen_batches": float(batches)}


def _rows_of(batch: DataProto, uids: Sequence[str]) -> DataProto:
    wanted = set(uids)
    return batch.select_idxs([row for row, uid in enumerate(batch.non_tensor_batch["uid"]) if str(uid) in wanted])
