import pytest

from rpcrl.trainer.totals import Totals


def test_totals_survive_a_checkpoint():
    totals = Totals()
    totals.add_phases({"gen": 1.0})
    totals.add_phases({"gen": 2.0, "adv": 0.5})
    totals.saw_heldout(0.4, step=0)
    totals.saw_heldout(0.9, step=7)
    back = Totals.from_json(totals.to_json())
    assert back == totals
    assert back.phases_s == {"gen": 3.0, "adv": 0.5}
    assert (back.heldout_start, back.heldout_end) == (0.4, 0.9)


def test_the_start_is_an_evaluation_before_training_or_nothing():
    totals = Totals()
    totals.saw_heldout(0.9, step=25)
    assert (totals.heldout_start, totals.heldout_end) == (None, 0.9)


def test_unknown_totals_are_refused():
    with pytest.raises(TypeError):
        Totals.from_json({"colour": 1})
