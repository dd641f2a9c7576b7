"""Do the counters say what was encoded, copied, shared and sent?"""

from __future__ import annotations

import os
import secrets
import threading

import numpy as np

from rpcrl.leftovers import remove_shared_memory
from rpcrl.shm.arena import Arena
from rpcrl.shm.budget import Budget
from rpcrl.traffic import Traffic, count, traffic
from rpcrl.transport.open import connect, listen
from rpcrl.wire.codec import decode, encode
from rpcrl.wire.messages import Encoded

KIB = 1024


def test_a_value_that_is_kept_and_read_is_counted() -> None:
    before = traffic()
    kept = encode(np.zeros(KIB)).own_copy()
    assert traffic() - before == Traffic(encodes=1, copied_bytes=8 * KIB)
    decode(kept)  # its buffer is bytes, which the receiver cannot have for its own
    assert traffic() - before == Traffic(encodes=1, copied_bytes=16 * KIB)
    decode(Encoded(kept.tree, tuple(bytearray(buffer) for buffer in kept.buffers)))  # type: ignore[arg-type]
    assert traffic() - before == Traffic(encodes=1, copied_bytes=16 * KIB)


def test_what_goes_into_shared_memory_is_counted_once() -> None:
    run_id = f"test-{os.getpid()}-{secrets.token_hex(6)}"
    budget = Budget(run_id, 1 << 24)
    try:
        before = traffic()
        encoded = encode({"large": np.zeros(100 * KIB), "small": np.zeros(KIB)})
        placed = Encoded(encoded.tree, Arena(budget, run_id, "a").place(encoded.buffers)).own_copy()
        assert traffic() - before == Traffic(encodes=1, copied_bytes=8 * KIB, shared_bytes=800 * KIB)
        assert placed.num_bytes > 808 * KIB
    finally:
        budget.close()
        remove_shared_memory(run_id)


def test_what_is_sent_is_counted(tmp_path) -> None:
    listener = listen(f"ipc://{tmp_path}/s")
    connection = connect(listener.address, identity="a")
    try:
        before = traffic()
        connection.send([b"x" * 100, bytearray(KIB)])
        assert listener.receive(10.0) == ("a", [b"x" * 100, bytearray(KIB)])
        listener.send("a", [b"y"])
        assert connection.receive(10.0) == [b"y"]
        assert traffic() - before == Traffic(sent_messages=2, sent_bytes=100 + KIB + 1)
    finally:
        connection.close()
        listener.close()


def test_threads_lose_no_count() -> None:
    before = traffic()
    threads = [threading.Thread(target=lambda: [count(encodes=1) for _ in range(5_000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert (traffic() - before).encodes == 40_000
