"""How do weights move through a channel, bucket by bucket, while the next bucket is packed and the last one is used?

Each rank has two buffers and one thread that runs the channel's collectives in their order; whoever uses it waits for
a bounded time, and can be told to stop waiting. The thread itself ends when the channel's timeout ends its collective:
what blocks inside gloo cannot be woken up.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rpcrl.engines.weight_plan import HEADER_BYTES, Piece, WeightPlan, WeightSpec, read_header, write_header
from rpcrl.errors import WeightSyncError

if TYPE_CHECKING:
    from rpcrl.engines.weight_channel import WeightChannel

__all__ = ["SyncGroup", "Transfer", "received_weights", "send_weights"]

GRACE_S = 2.0
"""How much longer than the channel's own timeout somebody waits for its thread."""
DEPTH = 2
"""Buffers of a rank: one is on its way while the other is packed or used."""

NamedTensor = tuple[str, Tensor]


class Transfer:
    """One collective that was asked for."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.done = False
        self.error: BaseException | None = None


class SyncGroup:
    """One rank's place in a group of ranks that weights are passed through; thrown away after the first error.

    ``name`` is the group's alone, for ever. Everything on the channel happens in one thread, in the order of the calls.
    """

    def __init__(self, name: str, channel: WeightChannel, *, timeout_s: float) -> None:
        self.name = name
        self.channel = channel
        self.joined = False
        self._timeout_s = timeout_s
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._broken = ""
        self._thread = threading.Thread(target=self._serve, name=f"rpcrl-sync-{name}", daemon=True)
        self._thread.start()

    @property
    def broken(self) -> str:
        """Why this group cannot be used any more; empty while it can."""
        return self._broken

    def listen(self, host: str) -> Mapping[str, Any]:
        """Open the channel, on rank 0; returns its address."""
        return self.channel.listen(host)

    def join(self, address: Mapping[str, Any], rank: int, world_size: int) -> None:
        """Meet the other ranks (collective). Raises WeightSyncError naming who did not come."""
        self.wait(self._submit(lambda: self.channel.join(self.name, address, rank, world_size)))
        self.joined = True

    def broadcast(self, buffer: Tensor) -> Transfer:
        """Have ``buffer`` sent, or filled on the receivers, after what was asked for before; returns at once."""
        return self._submit(lambda: self.channel.broadcast(buffer))

    def _submit(self, run: Any) -> Transfer:
        transfer = Transfer(run)
        self._queue.put(transfer)
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """Wait until a transfer is done. Raises WeightSyncError when it failed, was cancelled or is overdue."""
        deadline_s = time.monotonic() + self._timeout_s + GRACE_S
        with self._changed:
            while not (transfer.done or self._broken):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    self._broken = f"a collective did not end within {self._timeout_s:g} s"
                    break
                self._changed.wait(left_s)
            if transfer.done and transfer.error is None:
                return
            why = self._broken or f"{type(transfer.error).__name__}: {transfer.error}"
        raise WeightSyncError(f"sync group {self.name}: {why}") from transfer.error

    def cancel(self, why: str) -> None:
        """Have everybody who waits here fail now, for any thread; the group is broken from here on."""
        with self._changed:
            self._broken = self._broken or f"cancelled: {why}"
            self._changed.notify_all()

    def close(self) -> None:
        """Leave the group, after the collective that runs; does not wait for it."""
        self.cancel("the group was closed")
        self._queue.put(None)

    def _serve(self) -> None:
        while (transfer := self._queue.get()) is not None:
            if not self._broken:
                try:
                    transfer.run()
                except BaseException as error:
                    transfer.error = error
            with self._changed:
                if transfer.error is not None and not self._broken:
                    self._broken = f"{type(transfer.error).__name__}: {transfer.error}"
                transfer.done = not self._broken
                self._changed.notify_all()
            if self._broken:
                self.channel.close()  # now, not when somebody asks: ranks that wait for this one then fail at once
            del transfer  # and with it the buffer
        self.channel.close()


def _buffers(plan: WeightPlan, device: str) -> list[Tensor]:
    size = plan.buffer_bytes
    return [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(min(DEPTH, max(len(plan.buckets), 1)))]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _payload(buffer: Tensor, piece: Piece) -> Tensor:
    start = HEADER_BYTES + piece.offset_bytes
    return buffer[start : start + piece.num_bytes]


def send_weights(group: SyncGroup, plan: WeightPlan, tensors: Iterable[NamedTensor], *, number: int) -> None:
    """Send all tensors of a plan, as rank 0 of the group; a tensor is used until the next one is asked for.

    Raises WeightSyncError. ``tensors`` is read to its end then too: what yields them may be a collective of the ranks
    that train, and they have done nothing wrong.
    """
    source = iter(tensors)
    try:
        _send(group, plan, source, number)
    except BaseException:
        for _ in source:
            pass
        raise


def _send(group: SyncGroup, plan: WeightPlan, source: Iterator[NamedTensor], number: int) -> None:
    buffers = _buffers(plan, group.channel.buffer_device)
    on_the_way: list[Transfer | None] = [None] * len(buffers)
    named = plan.with_names(source)
    index, raw, begin = -1, torch.empty(0), 0
    for bucket, pieces in enumerate(plan.buckets):
        slot = bucket % len(buffers)
        if (transfer := on_the_way[slot]) is not None:
            group.wait(transfer)
        for piece in pieces:
            if piece.index != index:
                index, raw, begin = piece.index, _bytes_of(next(named)[1]), 0
            target, filled = _payload(buffers[slot], piece), 0
            while True:
                start = piece.start_bytes + filled - begin
                part = raw[start : start + piece.num_bytes - filled]
                target[filled : filled + part.numel()].copy_(part)
                filled += part.numel()
                if filled == piece.num_bytes:
                    break
                begin += raw.numel()
                raw = _bytes_of(next(named)[1])  # the next rows of the same tensor
        on_the_way[slot] = group.broadcast(write_header(buffers[slot], plan, number, bucket))
    for _ in named:  # there is none: it sees what the plan does not know of
        pass
    for transfer in on_the_way:
        if transfer is not None:
            group.wait(transfer)


def received_weights(
    group: SyncGroup, plan: WeightPlan, *, number: int, place: Callable[[str], Tensor | None] | None = None
) -> Iterator[list[NamedTensor]]:
    """Yield the tensors of each bucket as they come; valid until the next bucket is asked for.

    ``place`` says where a tensor that is larger than a bucket may be gathered: in the engine's own parameter, or (None)
    in memory of its own.
    Nothing of a bucket is yielded before its header and checksum are right. Raises WeightSyncError.
    """
    buffers = _buffers(plan, group.channel.buffer_device)
    sizes = [HEADER_BYTES + plan.payload_bytes(bucket) for bucket in range(len(plan.buckets))]
    coming = {bucket: group.broadcast(buffers[bucket][:size]) for bucket, size in enumerate(sizes[: len(buffers)])}
    large: Tensor | None = None
    for bucket, pieces in enumerate(plan.buckets):
        buffer = buffers[bucket % len(buffers)]
        group.wait(coming.pop(bucket))
        read_header(buffer, plan, number, bucket)
        large = _staged(plan, pieces, buffer, large, place)
        named = _named(plan, pieces, buffer, large)
        if named:
            yield named
        following = bucket + len(buffers)
        if following < len(sizes):
            coming[following] = group.broadcast(buffer[: sizes[following]])


def _staged(
    plan: WeightPlan,
    pieces: Sequence[Piece],
    buffer: Tensor,
    large: Tensor | None,
    place: Callable[[str], Tensor | None] | None,
) -> Tensor | None:
    """Copy a part of a tensor that is larger than a bucket to where its parts are gathered."""
    piece = pieces[0]
    spec = plan.specs[piece.index]
    if piece.num_bytes == spec.num_bytes:
        return None
    if piece.start_bytes == 0 or large is None:
        own = None if place is None else place(spec.name)
        if own is not None and WeightSpec.of(spec.name, own) == spec and own.is_contiguous():
            large = _bytes_of(own)
        else:
            large = torch.empty(spec.num_bytes, dtype=torch.uint8, device=buffer.device)
    large[piece.start_bytes : piece.start_bytes + piece.num_bytes].copy_(_payload(buffer, piece))
    return large


def _named(plan: WeightPlan, pieces: Sequence[Piece], buffer: Tensor, large: Tensor | None) -> list[NamedTensor]:
    found = []
    for piece in pieces:
        spec = plan.specs[piece.index]
        raw = _payload(buffer, piece)
        if piece.num_bytes < spec.num_bytes:
            if large is None or piece.start_bytes + piece.num_bytes < spec.num_bytes:
                continue
            raw = large
        found.append((spec.name, raw.view(spec.torch_dtype).view(spec.shape)))
    return found
