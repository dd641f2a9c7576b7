"""What does a rank do when weights go from one worker group to another? Its end of a sync, call by call.

The driver (``rpcrl.roles.pool_sync``) asks both sides what they have, tells the receivers what will come, has a
group made where there is none, and only then starts the transfer. A worker class of a user's own takes part by
inheriting from ``WeightSender`` or ``WeightReceiver``; each method here is one step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from rpcrl import env
from rpcrl.dispatch.mode import Execute
from rpcrl.dispatch.register import register
from rpcrl.errors import UsageError, WeightSyncError
from rpcrl.runtime.worker import Worker

if TYPE_CHECKING:
    import torch

    from rpcrl.engines.base import RolloutEngine
    from rpcrl.engines.weight_plan import WeightPlan
    from rpcrl.engines.weight_sync import SyncGroup

__all__ = ["ChecksWeights", "SyncMember", "WeightReceiver", "WeightSender"]

T = TypeVar("T")


@runtime_checkable
class ChecksWeights(Protocol):
    """A rollout engine that can tell beforehand whether weights fit it."""

    def check_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise UsageError, with nothing changed, when these are not the weights that ``update_weights`` needs."""
        ...


@runtime_checkable
class GivesPlaces(Protocol):
    """A rollout engine that lets a tensor larger than a bucket be gathered in its own parameter."""

    def weight_place(self, name: str) -> torch.Tensor | None:
        """Return the parameter; only a running ``update_weights`` asks, and one that fails leaves it torn."""
        ...


class SyncMember(Worker):
    """What both sides have in common: a place in a sync group, or in several of different partners."""

    sync_backend: str = "broadcast"
    """How weights cross: ``broadcast``, ``nccl``, or a channel class at ``module:Class``."""
    sync_timeout_s: float = 30.0
    """Bound of every collective of a sync."""
    _sync_groups: dict[str, SyncGroup] | None = None

    @register
    def sync_capabilities(self) -> dict[str, str]:
        """Return what this rank would take part with; both sides must return the same."""
        channel = self._new_channel()
        return {"backend": self.sync_backend, "transport": channel.transport}

    @register(execute_mode=Execute.RANK_ZERO)
    def sync_listen(self, name: str) -> dict[str, Any]:
        """Open the channel of a new group on this rank; returns its address."""
        # The address at which the other ranks of this group find this one; the store listens there and nowhere else.
        return dict(self._new_group(name).listen(env.get("MASTER_ADDR") or "127.0.0.1"))

    @register
    def sync_join(self, name: str, address: Mapping[str, Any], first_rank: int, world_size: int) -> bool:
        """Join a new group as rank ``first_rank + rank`` (collective); returns False if that is none of the group's."""
        rank = first_rank + self.rank
        if not self._takes_part(rank):
            return False
        group = self._groups().get(name) or self._new_group(name)
        group.join(address, rank, world_size)
        return True

    @register(concurrent=True)
    async def sync_cancel(self, name: str, why: str) -> None:
        """Have a transfer of group ``name`` that waits here fail now; the group is broken then."""
        group = self._groups().get(name)
        if group is not None:
            group.cancel(why)

    @register
    def sync_close(self, name: str) -> None:
        """Leave group ``name`` if this rank is in it."""
        group = self._groups().pop(name, None)
        if group is not None:
            group.close()

    def _takes_part(self, rank: int) -> bool:
        return True

    def _new_channel(self) -> Any:
        from rpcrl.engines.weight_channel import new_channel

        return new_channel(self.sync_backend, device=self.device or "cpu", timeout_s=self.sync_timeout_s)

    def _groups(self) -> dict[str, SyncGroup]:
        if self._sync_groups is None:
            self._sync_groups = {}
        return self._sync_groups

    def _new_group(self, name: str) -> SyncGroup:
        from rpcrl.engines.weight_sync import SyncGroup

        group = SyncGroup(name, self._new_channel(), timeout_s=self.sync_timeout_s)
        self._groups()[name] = group
        return group

    def _group(self, name: str) -> SyncGroup:
        group = self._groups().get(name)
        if group is None:
            known = ", ".join(self._groups()) or "none"
            raise WeightSyncError(f"rank {self.rank} is not in sync group {name} (it is in: {known})")
        return group


class WeightSender(SyncMember, ABC):
    """A rank that trains; rank 0 sends, the others help to gather the shards."""

    @abstractmethod
    def weight_specs(self) -> Sequence[tuple[str, str, Sequence[int]]]:
        """Return name, dtype and whole shape of each tensor, in the order of ``weight_buckets``."""

    @abstractmethod
    def weight_buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the full weights, bucket by bucket (collective); a bucket is valid until the next one."""

    def sent_buckets(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield what ``weight_buckets`` does, for rank 0 to send (collective); other ranks need yield nothing of it."""
        return self.weight_buckets(bucket_bytes)

    def score_tokens(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each token but the first, given those before it (collective).

        Only the canary (``rollout.canary``) asks for it. Raises UsageError where a class does not define it.
        """
        raise UsageError(
            f"{type(self).__name__} does not define score_tokens, which a rollout with rollout.canary=true compares "
            "itself with; define it or set rollout.canary=false"
        )

    @register
    def sync_offer(self, bucket_bytes: int) -> dict[str, Any]:
        """Plan a sync: returns the plan's digest, and on rank 0 the tensors that would be sent."""
        plan = self._plan(bucket_bytes)
        return {
            "digest": plan.digest,
            "specs": [spec.plain() for spec in plan.specs] if self.rank == 0 else [],
            "order": [spec.name for spec in plan.specs],
        }

    @register
    def sync_score(self, token_ids: Sequence[int]) -> list[float]:
        """Score the canary's text with the weights that were sent (collective)."""
        return self.score_tokens(token_ids)

    @register
    def sync_send(self, name: str, bucket_bytes: int, number: int) -> int:
        """Send the weights to all receivers of group ``name`` (collective); returns the bytes that rank 0 sent."""
        from rpcrl.engines.weight_sync import send_weights

        plan = self._plan(bucket_bytes)
        tensors = (pair for bucket in self.sent_buckets(bucket_bytes) for pair in bucket)
        if not self._takes_part(self.rank):
            for _ in tensors:
                pass
            return 0
        send_weights(self._group(name), plan, tensors, number=number)
        return plan.num_bytes

    def _takes_part(self, rank: int) -> bool:
        return rank == 0

    def _plan(self, bucket_bytes: int) -> WeightPlan:
        from rpcrl.engines.weight_plan import WeightPlan, WeightSpec

        specs = tuple(WeightSpec(name, dtype, tuple(shape)) for name, dtype, shape in self.weight_specs())
        return WeightPlan(specs, bucket_bytes)


class WeightReceiver(SyncMember):
    """A rank that samples and takes weights; it has its engine in ``_engine``."""

    sync_source: str = "actor"
    """Role that has the weights when it is in the same process."""
    sync_bucket_bytes: int = 256 << 20
    """Most bytes that are handed over at once in the same process."""
    sync_canary: bool = False
    """Hold the engine's log-probs of a fixed text against the trainer's after each sync, where the engine can."""
    sync_exact: bool = True
    """Whether both models compute in float32: their log-probs are the same then, but for the last bits."""
    _engine: RolloutEngine
    _sync_plan: WeightPlan | None = None

    @register
    def weight_version(self) -> int:
        """Return the version of the weights that would sample now on this rank."""
        return self._engine.weight_version

    @register
    def update_weights(self, version: int) -> int:
        """Wake up if asleep, take the weights of the trainer in this process, and carry ``version``.

        Collective with the trainer's other ranks. Returns the version that samples now.
        """
        from rpcrl.engines.waking import take_weights

        source: WeightSender = self.colocated(self.sync_source)
        tokens = self._canary_tokens()
        # Before anything that may fail on this rank alone: the others would wait for it.
        expected = source.score_tokens(tokens) if tokens else []
        buckets = source.weight_buckets(self.sync_bucket_bytes)
        return self._on_engine(
            lambda: take_weights(
                self._engine,
                buckets,
                version=version,
                then=lambda: self._check_canary(tokens, expected, version),
            )
        )

    @register
    def sync_canary_tokens(self) -> list[int]:
        """Return the text that the trainer should score for ``sync_check``; empty when nothing is to be checked."""
        return self._canary_tokens()

    @register
    def sync_check(self, tokens: Sequence[int], expected: Sequence[float], version: int) -> None:
        """Compare the engine with the trainer's log-probs of the text; it refuses to sample where they differ."""
        self._on_engine(lambda: self._check_canary(tokens, expected, version))

    def _canary_tokens(self) -> list[int]:
        from rpcrl.engines.canary import CanaryEngine, canary_tokens

        if self.sync_canary and isinstance(self._engine, CanaryEngine):
            return canary_tokens(self._engine)
        return []

    def _check_canary(self, tokens: Sequence[int], expected: Sequence[float], version: int) -> None:
        from rpcrl.engines.canary import CanaryEngine, check_canary

        if tokens and isinstance(self._engine, CanaryEngine):
            check_canary(self._engine, tokens, expected, version=version, exact=self.sync_exact)

    @register
    def sync_expect(self, specs: Sequence[Sequence[Any]], bucket_bytes: int) -> str:
        """Hear what will come, and get ready for it; returns the digest of the plan as this rank makes it.

        Raises UsageError when the weights do not fit the engine; nothing has been sent then.
        """
        from rpcrl.engines.weight_plan import WeightPlan, WeightSpec

        plan = WeightPlan(tuple(WeightSpec.from_plain(spec) for spec in specs), bucket_bytes)
        if isinstance(self._engine, ChecksWeights):
            self._engine.check_weights({spec.name: spec.shape for spec in plan.specs})
        self._sync_plan = plan
        return plan.digest

    @register
    def sync_receive(self, name: str, digest: str, number: int, version: int) -> int:
        """Take the weights that rank 0 of group ``name`` sends (collective); returns the version that samples now.

        ``digest`` is that of the plan which this rank was told last.

        When this raises, the driver hears the cause from here and tells the others: they do not wait for this rank.
        """
        from rpcrl.engines.waking import take_weights
        from rpcrl.engines.weight_sync import received_weights

        group, plan = self._group(name), self._sync_plan
        if plan is None or plan.digest != digest:
            raise UsageError(
                "sync_receive: other weights, or none, were announced to this rank; call sync_expect first"
            )

        place = self._engine.weight_place if isinstance(self._engine, GivesPlaces) else None
        weights = received_weights(group, plan, number=number, place=place)
        return self._on_engine(lambda: take_weights(self._engine, weights, version=version))

    def _on_engine(self, function: Callable[[], T]) -> T:
        """Call what uses the engine; a worker whose engine belongs to a thread calls it there."""
        return function()
