"""Does every step train on a whole batch of groups that differ, in the synchronous and the asynchronous modes?"""

import json

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)

from rpcrl.trainer.asynchronous import SeparateAsyncTrainer
from rpcrl.trainer.colocate import ColocateTrainer
from tests.e2e.jobs import metric_lines, train

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

MODES = {
    "colocate": (ColocateTrainer, ()),
    "separate-async": (
        SeparateAsyncTrainer,
        ("trainer.mode=separate-async", "trainer.v1.separate_async.parameter_sync_step=2"),
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_each_group_that_is_trained_on_differs_and_no_step_is_short(tmp_path, mode):
    trainer, settings = MODES[mode]
    trained = []

    class Noting(trainer):
        def update_actor(self, batch, step, *, meanwhile=None):
            columns = batch.non_tensor_batch
            groups = {}
            for uid, score in zip(columns["uid"], columns["score"], strict=True):
                groups.setdefault(str(uid), []).append(float(score))
            trained.append((step, groups))
            return super().update_actor(batch, step, meanwhile=meanwhile)

    # two samples a prompt: most groups of the shipped model do not differ
    train(tmp_path / "run", *settings, "algorithm.filter_groups.enable=true", "rollout.n=2", trainer=Noting)
    for step in (1, 2, 3):
        assert sum(len(groups) for number, groups in trained if number == step) == 8
    for _, groups in trained:
        assert all(len(scores) == 2 and scores[0] != scores[1] for scores in groups.values()), groups
    lines = metric_lines(tmp_path / "run")
    assert sum(line["training/filter_groups/evicted_samples"] for line in lines) > 0
    if mode == "separate-async":
        ledger = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
        reasons = [reason for line in ledger for _, _, reason in line["dropped"]]
        assert set(reasons) == {"filtered"}
        assert sum(line["training/rollout_failure/evicted_samples"] for line in lines) == 0
