"""What does a weight sync from one pool to another cost, beside a plain torch.distributed broadcast of as many bytes?

The roles of a run (actor, and rollouts with the ``torch`` engine) hold models of 135 and 494 million parameters. A sync
agrees by calls, gathers shards, packs, sends, verifies checksums and copies into the engines. Beside it, in turn, in
the same processes, gloo broadcasts as many bytes over a group of its own, from a buffer that nobody touches in between.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from report import options, report
from sync_ranks import TIMEOUT_S, RawActor, RawRollout

from rpcrl import Controller, ResourcePool, WorkerGroup
from rpcrl.bench.measure import Case, Row, row_of
from rpcrl.config.run import ActorRolloutRef
from rpcrl.roles.pool_sync import WeightSync
from rpcrl.testing.tiny_model import write_tiny_llama

RAW_BUFFER_BYTES = 64 * 2**20
MODELS = {
    "135M": {
        "vocabulary": 49_152, "hidden_size": 576, "intermediate_size": 1_536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    },
    "494M": {
        "vocabulary": 151_936, "hidden_size": 896, "intermediate_size": 4_864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64,
    },
}  # fmt: skip
"""Shapes of SmolLM2-135M and Qwen2.5-0.5B, with random weights."""


def measured(
    model: Path, name: str, trainers: int, rollouts: int, repeats: int, bucket_mib: int
) -> tuple[list[Row], dict[str, float]]:
    """Sync and broadcast in turn; returns a row for each, and what they come to."""
    settings = {"rollout": {"checkpoint_engine": {"backend": "broadcast", "update_weights_timeout_s": TIMEOUT_S}}}
    roles = ActorRolloutRef.model_validate(settings)
    common = {"model_path": str(model), "device": "cpu", "threads": 1}
    found: dict[str, list[float]] = {"rpcrl": [], "gloo": []}
    with Controller(console="off"):
        pools = [
            ResourcePool([count], device=None, name=pool)
            for pool, count in (("trainer", trainers), ("rollout", rollouts))
        ]
        actor = WorkerGroup(pools[0], RawActor, roles, **common, seed=0)
        rollout = WorkerGroup(pools[1], RawRollout, roles, **common)
        sync = WeightSync(actor, rollout, bucket_bytes=bucket_mib * 2**20, timeout_s=TIMEOUT_S)
        num_bytes = sum(4 * _numel(shape) for _, _, shape in actor.sync_offer(2**20)[0]["specs"])
        address = actor.workers[0].raw_listen()
        joins = [
            worker.raw_join.submit(address, first, 1 + rollouts, RAW_BUFFER_BYTES)
            for first, workers in ((0, actor.workers[:1]), (1, rollout.workers)) for worker in workers
        ]  # fmt: skip
        for join in joins:
            join.result(TIMEOUT_S)
        raw_workers = [actor.workers[0], *rollout.workers]
        for version in range(repeats + 1):
            began_s = time.perf_counter()
            sync.update_weights(version + 1)
            ours_s = time.perf_counter() - began_s
            calls = [worker.raw_broadcast.submit(num_bytes) for worker in raw_workers]
            raw_s = max(call.result(TIMEOUT_S) for call in calls)
            if version:
                found["rpcrl"].append(ours_s)
                found["gloo"].append(raw_s)
        for group in (actor, rollout):
            group.peak_begin()
        sync.update_weights(repeats + 2)
        peak = max(*actor.peak_end(), *rollout.peak_end())
        sync.close()
    where = f"{name} {trainers}->{rollouts}"
    rows = [
        row_of(Case(system, where, lambda _: [], workers=trainers + rollouts, mib=round(num_bytes / 2**20)), samples)
        for system, samples in found.items()
    ]
    return rows, {
        "of gloo's speed": round(statistics.median(found["gloo"]) / statistics.median(found["rpcrl"]), 3),
        "peak extra memory of a rank, buckets": round(peak / 2**20 / bucket_mib, 2),
    }


def _numel(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def main() -> None:
    """Measure, print, and write what was asked for."""
    chosen = options(
        __doc__ or "",
        ("--models", {"nargs": "*", "default": list(MODELS), "help": "of 135M, 494M"}),
        ("--bucket-mib", {"type": int, "default": 256, "help": "size of a bucket"}),
    )
    rows: list[Row] = []
    more: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.models:
            model = write_tiny_llama(Path(folder) / name, **MODELS[name])  # type: ignore[arg-type]
            for trainers, rollouts in ((1, 2), (2, 2)):
                some, figures = measured(model, name, trainers, rollouts, 2 if chosen.quick else 4, chosen.bucket_mib)
                rows += some
                more[f"{name} {trainers}->{rollouts}"] = figures
    report("weight sync between pools", rows, chosen.json, **more)


if __name__ == "__main__":
    main()
