"""The reply cache: nothing runs twice, and memory is bounded."""

from rpcrl.runtime.replies import Discarded, ReplyCache


def test_a_call_is_admitted_once_whatever_became_of_its_reply():
    cache = ReplyCache()
    assert cache.admit("c", 1)
    assert not cache.admit("c", 1)
    assert cache.lookup("c", 1) == (True, None)
    cache.store("c", 1, [b"reply"])
    assert not cache.admit("c", 1)
    assert cache.lookup("c", 1) == (True, [b"reply"])
    assert cache.lookup("c", 2) == (False, None)
    assert cache.lookup("d", 1) == (False, None)


def test_evicted_replies_leave_their_ids_behind():
    cache = ReplyCache(max_replies=2)
    for sequence in (1, 2, 3):
        cache.admit("c", sequence)
        cache.store("c", sequence, [b"x"])
    assert cache.lookup("c", 1) == (True, Discarded())
    assert cache.lookup("c", 3) == (True, [b"x"])
    assert not cache.admit("c", 1)


def test_bytes_are_bounded_and_a_giant_is_not_kept():
    cache = ReplyCache(max_bytes=10)
    for sequence, size in ((1, 6), (2, 6), (3, 11)):
        cache.admit("c", sequence)
        cache.store("c", sequence, [b"x" * size])
    assert cache.num_bytes == 6
    assert cache.lookup("c", 1) == (True, Discarded())
    assert cache.lookup("c", 2)[1] == [b"x" * 6]
    assert cache.lookup("c", 3) == (True, Discarded())


def test_the_watermark_frees_replies_and_still_refuses_old_calls():
    cache = ReplyCache()
    for sequence in (1, 2):
        cache.admit("c", sequence)
        cache.store("c", sequence, [b"xy"])
    cache.forget_below("c", 2)
    assert cache.num_bytes == 2
    assert not cache.admit("c", 1)
    assert cache.lookup("c", 1) == (True, Discarded())
    cache.forget_below("c", 1)
    assert cache.lookup("c", 2) == (True, [b"xy"])
