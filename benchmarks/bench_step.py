"""Where does the time of a training step go, and what of it is rpcrl's own?

In turn, five steps at a time, each in a process of its own and on one thread (``turns``):

- the default job with one worker (``step_ours``), with the sampler's log-probs as those of the old policy and, as
  ``recompute``, with a pass of their own;
- the same engine objects in a loop of one process (``step_loop``): what processes, calls and batches cost;
- a loop that shares nothing with anybody, written down tightly (``step_hand``);
- TRL's GRPOTrainer, where an interpreter that has it is found (``--trl PYTHON``, or `make bench-rivals`): same model,
  task, batch and updates; it recomputes the old log-probs, so it belongs beside ``recompute``.

With ``--large``: a model of 9.6 million parameters on one worker and on two, run by run in turn, by phase. The first
steps are left out (caches fill, the optimizer's state is made), and so is the first of each turn: in a run no other
process has the processor's caches between two steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from report import ROOT, options, report
from turns import Trainer, in_turn

from rpcrl.bench.measure import Case, Row, row_of

LEFT_OUT_STEPS = 5
TURN_STEPS = 5
"""Steps of a turn; the first of them is not measured."""
HERE = Path(__file__).resolve().parent


def train(run_dir: Path, *settings: str) -> list[dict[str, float]]:
    """Run the default job with ``settings`` into ``run_dir``; returns the figures of its later steps."""
    command = [sys.executable, "-m", "rpcrl.cli.main", "launch", "--mode", "colocate", "--run-dir", str(run_dir)]
    done = subprocess.run(
        [*command, *settings],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"the job failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if "timing_s/step" in entry][LEFT_OUT_STEPS:]


def side_by_side(steps: int, trl: str | None) -> tuple[list[Row], dict[str, object]]:
    """Let all trainers make their steps in turn; returns a row a phase, and the ratios of a step."""
    count = steps + LEFT_OUT_STEPS
    command = [sys.executable, HERE / "step_ours.py", str(count)]
    trainers = [
        Trainer("rpcrl", command),
        Trainer("recompute", [*command, "algorithm.recompute_old_log_prob=true"]),
        Trainer("loop", [sys.executable, HERE / "step_loop.py", str(count)]),
        Trainer("hand", [sys.executable, HERE / "step_hand.py", str(count)]),
    ]
    if trl is not None:
        trainers.append(Trainer("trl", [trl, HERE / "rivals" / "trl_grpo.py", str(count)]))
    in_turn(trainers, count, at_once=TURN_STEPS)
    rows, step = [], {}
    for trainer in trainers:
        turns = [turn for number, turn in enumerate(trainer.turns) if number >= LEFT_OUT_STEPS and number % TURN_STEPS]
        step[trainer.name] = median(turn["step"] for turn in turns)
        for name in [name for name in turns[0] if name == "step" or name.startswith("phase/")]:
            case = Case(trainer.name, name.removeprefix("phase/"), lambda: None, variant="in turn", workers=1)
            rows.append(row_of(case, [turn[name] for turn in turns]))
    ours, theirs = ([turn["grad_norm"] for turn in trainer.turns] for trainer in (trainers[0], trainers[2]))
    if any(abs(mine - other) > 1e-3 * other for mine, other in zip(ours, theirs, strict=True)):
        raise SystemExit(f"the loop does not do what the trainer does; norms of the gradients: {ours} and {theirs}")
    ratios: dict[str, object] = {
        f"step_against_{name}": round(step["rpcrl"] / step[name], 3) for name in ("loop", "hand")
    }
    if trl is not None:
        ratios["step_against_trl"] = round(step["rpcrl"] / step["trl"], 3)
        ratios["recompute_against_trl"] = round(step["recompute"] / step["trl"], 3)
    last = min(10, steps)
    rewards = {each.name: sum(turn["reward"] for turn in each.turns[-last:]) / last for each in trainers}
    return rows, {**ratios, "reward_at_the_end": {name: round(reward, 3) for name, reward in rewards.items()}}


def large(steps: int, repeats: int) -> tuple[list[Row], dict[str, object]]:
    """Train a model of 9.6 million parameters on one worker and on two, in turn; returns rows and the speed-ups."""
    from rpcrl.engines.hf_model import copy_tokenizer, load_config
    from rpcrl.tasks.sort_digits import base_checkpoint
    from rpcrl.testing.tiny_model import write_tiny_llama

    vocabulary = load_config(base_checkpoint()).vocab_size
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory(prefix="rpcrl-bench-") as folder:
        shape = {"hidden_size": 256, "intermediate_size": 800, "num_hidden_layers": 11, "initializer_range": 0.02}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
        model = write_tiny_llama(Path(folder) / "model", vocabulary=vocabulary, **heads, **shape)
        copy_tokenizer(base_checkpoint(), model)
        settings = [f"trainer.total_training_steps={steps + LEFT_OUT_STEPS}", f"model.path={model}"]
        settings += ["trainer.val_before_train=false", "trainer.test_freq=-1", "data.val_max_samples=2"]
        for number in range(repeats):
            for workers in (1, 2) if number % 2 == 0 else (2, 1):
                run_dir = Path(folder) / f"run-{number}-{workers}"
                found[workers] += train(run_dir, *settings, f"trainer.n_gpus_per_node={workers}")
    rows, speed_up = [], {}
    for phase in ("step", "gen", "reward", "adv", "update_actor", "update_weights"):
        times = {workers: [entry[f"timing_s/{phase}"] for entry in every] for workers, every in found.items()}
        for workers, every in times.items():
            case = Case("rpcrl", phase, lambda: None, variant="9.6M model", workers=workers)
            rows.append(row_of(case, every))
        speed_up[phase] = round(median(times[1]) / median(times[2]), 3)
    return rows, {"two_workers_speed_up": speed_up}


def trl_python(named: str | None) -> str | None:
    """Return an interpreter that has trl: the named one, or that of `make bench-rivals`; None if there is none."""
    installed = ROOT / ".rivals" / "trl" / "bin" / "python"
    return named or (str(installed) if installed.exists() else None)


def main() -> None:
    """Measure, and print."""
    chosen = options(
        __doc__ or "",
        ("--large", {"action": "store_true", "help": "also the model of 9.6 million parameters"}),
        ("--trl", {"metavar": "PYTHON", "help": "an interpreter that has trl"}),
    )
    rows, more = side_by_side(5 if chosen.quick else 100, trl_python(chosen.trl))
    if chosen.large:
        found, speed_up = large(3 if chosen.quick else 10, 1 if chosen.quick else 3)
        rows += found
        more.update(speed_up)
    report("bench_step: a step of the default job beside others", rows, chosen.json, **more)


if __name__ == "__main__":
    main()
