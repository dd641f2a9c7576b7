"""Are groups that teach nothing replaced, without a step ever being short of groups?"""

import numpy as np
import pytest
import torch

from rpcrl.batch.data_proto import DataProto
from rpcrl.config.run import FilterGroups
from rpcrl.errors import BatchError
from rpcrl.trainer.group_filter import GroupFilter, differs


def batch_of(groups):
    """Rows of groups ``uid → scores``, side by side."""
    rows = [(uid, score) for uid, scores in groups.items() for score in scores]
    columns = {
        "uid": np.array([uid for uid, _ in rows], dtype=object),
        "raw": np.array([score for _, score in rows], dtype=object),
    }
    return DataProto.from_dict(tensors={"responses": torch.arange(len(rows))[:, None]}, non_tensors=columns)


def scored(batch):
    return batch.union(DataProto.from_dict(non_tensors={"score": batch.non_tensor_batch["raw"]}))


def filter_of(**settings):
    return GroupFilter(FilterGroups(enable=True, **settings), scored)


def sampler_of(*batches):
    left = list(batches)
    return lambda: batch_of(left.pop(0))


def uids(batch):
    return [str(uid) for uid in batch.non_tensor_batch["uid"]]


def test_only_groups_whose_samples_differ_are_kept_and_a_lone_sample_is():
    batch = scored(batch_of({"a": [0, 1], "b": [1, 1], "c": [0, 0], "d": [0]}))
    assert differs(batch, "score") == {"a": True, "b": False, "c": False, "d": True}


def test_a_batch_is_filled_up_in_order_and_its_surplus_discarded():
    groups = filter_of()
    sample = sampler_of({"a": [0, 1], "b": [1, 1]}, {"c": [0, 0], "d": [1, 0]}, {"e": [0, 1], "f": [1, 0]})
    batch = groups.fill(sample, 3)
    assert uids(batch) == ["a", "a", "d", "d", "e", "e"]
    assert [float(score) for score in batch.non_tensor_batch["score"]] == [0, 1, 1, 0, 0, 1]
    assert groups.counts == {
        "training/filter_groups/evicted_samples": 2,
        "training/filter_groups/discarded_surplus_samples": 1,
        "training/filter_groups/num_gen_batches": 3,
    }


@pytest.mark.parametrize(("bound", "batches"), [(1, 1), (2, 2)])
def test_a_step_that_cannot_be_filled_ends_with_the_settings_to_change(bound, batches):
    calls = []

    def sample():
        calls.append(None)
        return batch_of({f"{len(calls)}": [1, 1], f"{len(calls)}b": [0, 1]})

    groups = filter_of(max_num_gen_batches=bound)
    with pytest.raises(BatchError, match=rf"samples of {batches} prompts.*max_num_gen_batches={bound} .*rollout.n"):
        groups.fill(sample, 5)
    assert len(calls) == batches


def test_without_a_bound_it_goes_on():
    batches = [{str(number): [1, 1]} for number in range(30)] + [{"last": [0, 1]}]
    assert uids(filter_of(max_num_gen_batches=0).fill(sampler_of(*batches), 1)) == ["last", "last"]


def test_a_metric_that_is_not_there_or_no_number_is_named():
    batch = scored(batch_of({"a": [0, 1]}))
    with pytest.raises(BatchError, match=r"filter_groups\.metric=acc: .*no column of that name, only raw, score, uid"):
        differs(batch, "acc")
    with pytest.raises(BatchError, match="value 'a' of prompt a is not a number"):
        differs(batch, "uid")


def test_one_group_is_scored_and_kept_or_not():
    assert filter_of().kept(batch_of({"a": [1, 1]})) is None
    kept = filter_of().kept(batch_of({"a": [1, 0]}))
    assert kept is not None
    assert "score" in kept.non_tensor_batch
