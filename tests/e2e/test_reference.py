"""Is the reference policy the same one in the actor's processes and in its own?"""

import pytest
import tensorboardX  # noqa: F401  (sets an environment variable when it is first imported)

from tests.e2e.jobs import metric_lines, train, weights_of, without_times

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

JOB = (
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=2",
    "actor.use_kl_loss=true",
    "actor.kl_loss_coef=0.1",
)


def test_a_reference_in_its_own_group_trains_the_same(tmp_path):
    shared = train(tmp_path / "shared", *JOB)
    assert shared.groups.reference.name == shared.groups.actor.name
    apart = train(tmp_path / "apart", *JOB, "ref.own_group=true")
    assert apart.groups.reference.name == "ref"
    assert apart.groups.by_role().keys() == shared.groups.by_role().keys()
    assert metric_lines(tmp_path / "apart")[-1]["actor/kl_loss"] > 0, "the policy has moved away from it"
    lines = [[without_times(line) for line in metric_lines(tmp_path / name)] for name in ("shared", "apart")]
    assert lines[0] == lines[1]
    assert weights_of(tmp_path / "apart") == weights_of(tmp_path / "shared")
