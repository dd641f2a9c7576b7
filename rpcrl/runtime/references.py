"""How do rows get from the worker that keeps them to the process that reads them? By a call to its store.

The consumer asks each keeper for exactly its rows and columns, all keepers at once; the driver is not in the path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rpcrl.batch.reference import BatchRef, Column, Stored, Want
from rpcrl.errors import UsageError
from rpcrl.runtime.caller import Part
from rpcrl.runtime.future import Finish, Future, PendingReplies
from rpcrl.runtime.lease import Lease
from rpcrl.runtime.router import Router
from rpcrl.runtime.store import STORE, Store, is_keepable
from rpcrl.runtime.worker import context, in_worker
from rpcrl.wire.codec import decode, encode, register_codec

if TYPE_CHECKING:
    from rpcrl.batch.data_proto import DataProto

__all__ = ["BatchRef", "RouterReader", "from_store", "held", "read", "reader_of"]


class RouterReader:
    """Reads rows over a router; a worker reads its own store directly."""

    def __init__(self, router: Router, own_identity: str = "", own_store: Store | None = None) -> None:
        self._router = router
        self._own_identity = own_identity
        self._own_store = own_store

    @property
    def run_id(self) -> str:
        """The run whose workers it reads from."""
        return self._router.run_id

    def read(self, wants: Sequence[Want]) -> list[DataProto]:
        """Return a batch for each want, in order."""
        waiting: list[Any] = []
        for want in wants:
            if self._own_store is not None and want.stored.identity == self._own_identity:
                waiting.append(self._own_store.read(want.stored.key, want.rows, want.names).select(deepcopy=True))
            else:
                waiting.append(self._ask(want))
        return [each.result() if isinstance(each, Future) else each for each in waiting]

    def _ask(self, want: Want) -> Future[DataProto]:
        stored, imports = want.stored, self._router.imports
        self._router.check_usable()
        payload = encode(((stored.key, want.rows, want.names), {}), path=("args", "kwargs"), imports=imports)
        text = f"reading {len(want.rows)} rows of {', '.join(want.names)} from rank {stored.rank} of {stored.group!r}"
        pending = PendingReplies(text, [stored.rank])
        self._router.call(stored.group, STORE, "read", [Part(stored.identity, payload)], pending)
        finish: Finish[DataProto] = Finish(
            lambda replies: [decode(reply.payload, imports=imports) for reply in replies], lambda outputs: outputs[0]
        )
        return Future(pending, finish, cancel=self._router.cancel)


def from_store(look: dict[str, Any], *, group: str, rank: int, lease: Lease, router: Router) -> BatchRef:
    """Return the reference to a result that a worker says it keeps."""
    stored = Stored(group, lease.identity, rank, lease.key, look["rows"])
    columns = {name: Column(*column) for name, column in look["columns"].items()}
    ref = BatchRef.of_stored(stored, columns, look["meta_info"], reader=reader_of(router), lease=lease)
    ref.as_tensordict = look["tensordict"]
    ref.stayed = True
    return ref


def held(batch: Any) -> BatchRef:
    """Return a reference that has the rows of a batch with it. Raises UsageError for anything else."""
    from rpcrl.batch.data_proto import DataProto

    if not is_keepable(batch):
        raise UsageError(f"only a DataProto or a TensorDict can be referred to, not a {type(batch).__name__}")
    ref = BatchRef.of_batch(batch if isinstance(batch, DataProto) else DataProto.from_tensordict(batch))
    ref.as_tensordict = not isinstance(batch, DataProto)
    return ref


def reader_of(router: Router) -> RouterReader:
    """Return the way to the rows for a router."""
    if not in_worker():
        return RouterReader(router)
    here = context()
    return RouterReader(router, here.identity, here.store)


def read(plain: Any) -> BatchRef:
    """Return the reference that another process has sent. Raises UsageError if its run is none of this process's."""
    ref = BatchRef.from_plain(plain["ref"], reader=_reader_of_run(plain["run"]))
    ref.as_tensordict = plain["tensordict"]
    return ref


def _write(ref: BatchRef) -> object:
    return {"ref": ref.to_plain(), "tensordict": ref.as_tensordict, "run": ref.run_id}


def _reader_of_run(run_id: str) -> RouterReader | None:
    """Return the way to a run's workers; None for a reference that has all its rows with it."""
    if not run_id:
        return None
    if in_worker():
        router = context().router
        if router is None or router.run_id != run_id:
            raise UsageError(f"a reference of run {run_id} cannot be read in a worker of another run")
        return reader_of(router)
    from rpcrl.runtime.controller import open_controller

    return RouterReader(open_controller(run_id))


register_codec(BatchRef, name="rpcrl.BatchRef", encode=_write, decode=read, replace=True)
