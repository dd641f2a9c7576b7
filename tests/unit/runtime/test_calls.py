"""The table of open calls: ids, duplicates, probes, resends."""

import time

from rpcrl.runtime.calls import FIRST_PROBE_S, SLOWEST_PROBE_S, CallTable
from rpcrl.wire.messages import CallId, Encoded, Status

PAYLOAD = Encoded(b"\xc0")


def table() -> CallTable[str]:
    calls: CallTable[str] = CallTable("me")
    calls.add_peer("w0", "i0")
    return calls


def test_sequences_rise_and_ids_name_caller_and_incarnation():
    calls = table()
    ids = [calls.open("w0", "r", "m", PAYLOAD, "t", now=0.0).call_id for _ in range(3)]
    assert ids == [CallId("me", "i0", number) for number in (1, 2, 3)]


def test_a_second_reply_and_a_reply_of_another_life_are_nobodys():
    calls = table()
    call = calls.open("w0", "r", "m", PAYLOAD, "t", now=0.0)
    assert calls.close("w0", CallId("me", "old", 1)) is None
    entry = calls.close("w0", call.call_id)
    assert entry is not None
    assert entry.token == "t"
    assert calls.close("w0", call.call_id) is None
    assert calls.close("w9", call.call_id) is None


def test_answered_below_is_the_oldest_open_call():
    calls = table()
    first = calls.open("w0", "r", "m", PAYLOAD, "a", now=0.0)
    second = calls.open("w0", "r", "m", PAYLOAD, "b", now=0.0)
    calls.close("w0", second.call_id)
    assert calls.open("w0", "r", "m", PAYLOAD, "c", now=0.0).answered_below == 1
    calls.close("w0", first.call_id)
    assert calls.open("w0", "r", "m", PAYLOAD, "d", now=0.0).answered_below == 3


def test_silence_is_probed_and_a_running_call_slows_the_probes():
    calls = table()
    calls.open("w0", "r", "m", PAYLOAD, "a", now=0.0)
    assert calls.probes(now=FIRST_PROBE_S - 0.01) == []
    assert calls.next_probe_at() == FIRST_PROBE_S
    (identity, probe), *rest = calls.probes(now=FIRST_PROBE_S)
    assert (identity, probe.sequences, probe.incarnation, rest) == ("w0", (1,), "i0", [])
    now = FIRST_PROBE_S
    paces = []
    for _ in range(8):
        assert calls.on_status("w0", Status("me", running={1: now}), now=now) == []
        due = calls.next_probe_at()
        assert due is not None
        paces.append(due - now)
        now = due
    assert paces == sorted(paces)
    assert paces[-1] == SLOWEST_PROBE_S


def test_only_a_call_that_never_arrived_is_sent_again_under_its_id():
    calls = table()
    call = calls.open("w0", "r", "m", PAYLOAD, "a", now=0.0)
    assert calls.on_status("w0", Status("me", unknown=(1, 7)), now=1.0) == [call]
    assert calls.on_status("w0", Status("somebody else", unknown=(1,)), now=1.0) == []
    calls.close("w0", call.call_id)
    assert calls.on_status("w0", Status("me", unknown=(1,)), now=1.0) == []


def test_dropped_workers_give_their_calls_back_in_order():
    calls = table()
    calls.add_peer("w1", "i1")
    calls.open("w1", "r", "m", PAYLOAD, "first", now=0.0)
    calls.open("w0", "r", "m", PAYLOAD, "second", now=1.0)
    assert [entry.token for entry in calls.drop_peers(["w0", "w1", "w2"])] == ["first", "second"]
    assert calls.num_open == 0


def test_thousands_of_open_calls_are_not_all_looked_at_for_each_message():
    calls = table()
    began_s = time.process_time()
    ids = [calls.open("w0", "r", "m", PAYLOAD, "t", now=0.0).call_id for _ in range(20_000)]
    for call_id in ids:
        assert calls.probes(now=0.5) == []
        assert calls.next_probe_at() == FIRST_PROBE_S
        assert calls.close("w0", call_id) is not None
    assert calls.num_open == 0
    # 0.1 s here; looking at every open call for each message takes a hundred times as long
    assert time.process_time() - began_s < 3.0
    assert calls.probes(now=FIRST_PROBE_S) == []
    assert calls.next_probe_at() is None
