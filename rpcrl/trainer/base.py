"""What do all trainer modes share? Start, restore, the loop around a step, evaluation, checkpoints and the end.

A mode is a subclass that says what one step does (``ColocateTrainer``). The driver's heavy libraries are imported
after the worker processes have been told to start, so both load at the same time.
"""

from __future__ import annotations

import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rpcrl.config.account import learners
from rpcrl.errors import ConfigError, UsageError, Violation
from rpcrl.logs import get_logger
from rpcrl.runtime.loading import loading
from rpcrl.trainer.checkpoint import CheckpointStore, Manifest, check_world, read_manifest
from rpcrl.trainer.groups import GroupStart, RoleGroups, named_processes, resolve_device
from rpcrl.trainer.metrics import PhaseTimer, tensors_of
from rpcrl.trainer.observer import Observer, RunInfo
from rpcrl.trainer.resume import check_same_run, deciding_settings, named_checkpoint, run_path
from rpcrl.trainer.run_directory import RunDirectory, write_atomically
from rpcrl.trainer.totals import Totals

if TYPE_CHECKING:
    from rpcrl.algorithms.kl import KlController
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.config.run import RunConfig
    from rpcrl.runtime.controller import Controller
    from rpcrl.trainer.steps import Sampling
    from rpcrl.trainer.tracking import Tracking
    from rpcrl.trainer.validation import Validation

__all__ = ["Trainer"]

log = get_logger(__name__)


class Trainer(ABC):
    """A run of one mode, from its configuration to its summary. Use it once.

    ``run_dir`` overrides the configuration's; ``observer`` hears of the progress; ``console`` and ``console_sink``
    say which lines of the workers are shown, and who takes them (see ``Controller``).
    """

    mode: ClassVar[str] = ""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_dir: Path | str | None = None,
        observer: Observer | None = None,
        console: str = "default",
        console_sink: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config
        self.observer = observer or Observer()
        self.totals = Totals()
        self.groups: RoleGroups
        self.run: RunDirectory
        self.tokenizer: Any = None
        self.kl: KlController | None = None
        self.train: Any = None
        self.heldout: Any = None
        self.weight_version = 0
        self.start_step = 0
        self.unfinished_prompts: list[str] = []
        """Prompts that the run to go on with had drawn and not trained on."""
        self._console = console
        self._console_sink = console_sink
        self._reward_fn: str | None = None
        self._run_dir = run_dir
        self._began_s = time.perf_counter()
        self._earlier_wall_s = 0.0

    # -- what a mode provides ------------------------------------------------------------------------------------------

    @abstractmethod
    def step(self, step: int, timer: PhaseTimer) -> dict[str, float]:
        """Do everything of one step, including the weight sync at its end; returns its metrics."""

    def on_train_begin(self) -> None:  # noqa: B027  # a hook that need not be used
        """Do what has to be done before the first step: nothing here."""

    def on_train_end(self) -> None:  # noqa: B027  # as above
        """Do what has to be done after the last step: nothing here."""

    def in_flight(self) -> list[str]:
        """Return the prompts that were drawn and have had no end yet, for a checkpoint: none here."""
        return []

    # -- the three uses ------------------------------------------------------------------------------------------------

    def fit(self) -> Mapping[str, object]:
        """Train to the last step; returns the content of summary.json.

        Raises ConfigError or CheckpointError before any process starts when the run directory or the checkpoint does
        not fit; errors of the run end its processes in order. A run that is finished is not run again: its summary
        comes back.
        """
        with self._opened(training=True) as found:
            return self._fit(found)

    def _fit(self, found: tuple[Path, Manifest] | None) -> Mapping[str, object]:
        last_step = self.config.trainer.total_training_steps
        if found is not None and last_step is not None and found[1].step >= last_step:
            summary = self.run.read_summary()
            if summary is not None and summary["mode"] == self.mode:
                self.observer.on_status(
                    f"this run is finished: step {found[1].step} of {last_step} is done; to go on, set a larger "
                    "trainer.total_training_steps"
                )
                return summary
        with self._open_controller() as controller:
            self._start(controller)
            self._restore(found)
            self._write_config()
            self._announce(self.mode)
            with self._open_tracking() as tracking:
                self._sync_weights(self.weight_version)
                self._validate_at_start(tracking)
                self.on_train_begin()
                for step in range(self.start_step + 1, self.total_steps + 1):
                    self._one_step(step, tracking)
                self.on_train_end()
            return self._finish()

    def evaluate(self) -> dict[str, float]:
        """Answer the held-out prompts with the model (or the checkpoint of ``trainer.resume``); nothing is trained."""
        with self._opened(heldout_needed=True) as found, self._open_controller() as controller:
            self._start(controller)
            self._restore(found)
            self._write_config(keep=True)
            self._announce("eval-only")
            self._sync_weights(self.weight_version)
            validation = self.validate(self.start_step)
            self._write_summary("eval-only", steps=self.start_step)
        return validation.metrics

    def generate(self) -> Path:
        """Sample one training batch per step without training; returns the folder of the samples."""
        with self._opened() as found, self._open_controller() as controller:
            self._start(controller)
            self._restore(found)
            self._write_config(keep=True)
            self._announce("generate-only")
            self._sync_weights(self.weight_version)
            from rpcrl.trainer import steps
            from rpcrl.trainer.validation import sample_rows

            for step in range(self.start_step + 1, self.total_steps + 1):
                timer = PhaseTimer(lambda phase, step=step: self.observer.on_phase(step, phase))  # type: ignore[misc]
                with timer("gen"):
                    batch = steps.generate(self.groups.sampler, self.next_prompts(), self.sampling, step=step)
                with timer("reward"):
                    batch = self.reward(batch)
                self.run.write_samples(f"step_{step}", sample_rows(batch, len(batch)))
                tokens = int(tensors_of(batch)["attention_mask"].sum())
                self._count(tokens, timer)
                scores = [float(value) for value in batch.non_tensor_batch["score"]]
                figures = {"critic/score/mean": sum(scores) / len(scores)}
                figures.update({f"timing_s/{phase}": seconds for phase, seconds in timer.seconds.items()})
                self.observer.on_step(step, figures)
            self._write_summary("generate-only", steps=self.total_steps)
        return self.run.samples

    def reward(self, batch: DataProto) -> DataProto:
        """Score the responses of a batch."""
        from rpcrl.trainer import steps

        weight = self.config.reward.reward_model.weight
        return steps.reward(
            self.groups.reward, batch, self.tokenizer, model=self.groups.reward_model, model_weight=weight
        )

    # -- what steps read -----------------------------------------------------------------------------------------------

    @property
    def total_steps(self) -> int:
        """Number of the last step."""
        steps = self.config.trainer.total_training_steps
        if steps is not None:
            return steps
        if self.train is None:
            raise UsageError("trainer.total_epochs is counted in steps only once the prompts are loaded")
        per_epoch = self.train.batches_per_epoch
        if per_epoch is None:
            raise ConfigError(
                [
                    Violation(
                        "trainer.total_epochs",
                        "the built-in task has no end, so its epochs have no length",
                        ("set trainer.total_training_steps",),
                    )
                ]
            )
        return int(per_epoch) * (self.config.trainer.total_epochs or 1)

    @property
    def sampling(self) -> Sampling:
        """How training samples are drawn."""
        from rpcrl.trainer.samplings import training_sampling

        return training_sampling(self.config)

    @property
    def validation_sampling(self) -> Sampling:
        """How held-out prompts are answered."""
        from rpcrl.trainer.samplings import validation_sampling

        return validation_sampling(self.config)

    def next_prompts(self) -> Any:
        """Return the prompts of the next step, each with a ``uid`` of its own: noise and groups go by it."""
        return self.train.next_batch()

    # -- parts of a run ------------------------------------------------------------------------------------------------

    @contextmanager
    def _opened(
        self, *, training: bool = False, heldout_needed: bool = False
    ) -> Iterator[tuple[Path, Manifest] | None]:
        """Check everything, hold the run directory, and give the checkpoint to go on from; no process has started."""
        from rpcrl.trainer.sources import open_prompts, reward_function, source_checks

        wrong = source_checks(self.config, heldout_needed=heldout_needed)
        if wrong:
            raise ConfigError(wrong)
        self._reward_fn = reward_function(self.config)
        self._prompts = open_prompts(self.config, heldout_needed=heldout_needed)
        path, checkpoint = run_path(self.config, self._run_dir), named_checkpoint(self.config)
        auto = self.config.trainer.resume == "auto"
        own = auto or (checkpoint is not None and path in checkpoint.parents)
        with RunDirectory.held(path, resume=own) as run:
            self.run = run
            self._store = CheckpointStore(run.checkpoints, keep=self.config.trainer.max_actor_ckpt_to_keep)
            found = self._found(self._store.latest() if auto else checkpoint, training=training)
            if auto and found is None:
                self.observer.on_status(f"no checkpoint in {path}: starting at step 1")
            run.make_parts()
            yield found

    def _found(self, checkpoint: Path | None, *, training: bool) -> tuple[Path, Manifest] | None:
        """Return a checkpoint with its manifest; raises when it is damaged or is not one of this run."""
        if checkpoint is None:
            return None
        manifest = read_manifest(checkpoint)
        trainer = self.config.trainer
        ranks = trainer.nnodes * trainer.n_gpus_per_node
        roles = [learner.name for learner in learners(self.config)] if training else ["actor"]
        check_world(manifest, dict.fromkeys(roles, ranks), directory=checkpoint)
        if training:
            check_same_run(manifest.settings, self.config, directory=checkpoint)
        return checkpoint, manifest

    def last_checkpoint(self) -> Path | None:
        """Return the last checkpoint of the run; None when it has none, or has not begun."""
        return self._store.latest() if hasattr(self, "_store") else None

    def _open_controller(self) -> Controller:
        from rpcrl.runtime.controller import Controller

        self.observer.on_status("starting")
        return Controller(log_dir=self.run.logs, console=self._console, console_sink=self._console_sink)

    def _start(self, controller: Controller) -> None:
        from rpcrl.trainer.sources import critic_folder, model_folder

        self.observer.on_status(f"starting {named_processes(self.config, self._reward_fn)}")
        model_path = str(model_folder(self.config))
        starting = GroupStart(
            controller,
            self.config,
            model_path=model_path,
            critic_path=str(critic_folder(self.config)),
            reward_fn=self._reward_fn,
            device=resolve_device(self.config),
        )
        self._load_driver(model_path)
        self.groups = starting.result()

    def _load_driver(self, model_path: str) -> None:
        with loading():
            import torch

            from rpcrl.algorithms.kl import kl_controller
            from rpcrl.engines.hf_model import load_tokenizer
            from rpcrl.trainer.sources import open_heldout, open_training

            torch.set_num_threads(1)
            self.tokenizer = load_tokenizer(model_path)
        if self.config.algorithm.use_kl_in_reward:
            of = self.config.algorithm.kl_ctrl
            self.kl = kl_controller(of.type, kl_coef=of.kl_coef, target_kl=of.target_kl, horizon=of.horizon)
        self.train = open_training(self.config, self._prompts, self.tokenizer)
        self.heldout = open_heldout(self.config, self._prompts, self.tokenizer)

    def _restore(self, found: tuple[Path, Manifest] | None) -> None:
        if found is None:
            return
        directory, manifest = found
        self.observer.on_status(f"restoring step {manifest.step} from {directory}")
        self.train.load_state(manifest.data)
        for role, group in self.groups.learners().items():
            if role in manifest.ranks:  # an evaluation of a run without a critic may have one configured
                group.load_checkpoint(str(directory), manifest.ranks[role])
        self.start_step = manifest.step
        self.weight_version = manifest.weight_version
        self.unfinished_prompts = list(manifest.unfinished_prompts)
        if self.kl is not None and manifest.kl_coef is not None:
            self.kl.coefficient = manifest.kl_coef
        self.totals = Totals.from_json(manifest.totals)
        self._earlier_wall_s = self.totals.wall_s

    def _write_config(self, *, keep: bool = False) -> None:
        """Write config.yaml, now that all is checked; ``keep`` leaves that of the training that was here."""
        from rpcrl.config.load import to_yaml

        if not (keep and self.run.config.exists()):
            write_atomically(self.run.config, to_yaml(self.config))

    def _announce(self, mode: str) -> None:
        roles = {role: group.world_size for role, group in self.groups.by_role().items()}
        self.observer.on_start(RunInfo(mode, self.run.path, self.start_step, self.total_steps, roles))

    def _open_tracking(self) -> Tracking:
        from rpcrl.trainer.tracking import Tracking

        return Tracking(self.run, start_step=self.start_step)

    def _sync_weights(self, version: int) -> None:
        from rpcrl.trainer import steps

        steps.update_weights(self.groups.sync or self.groups.rollout, version=version)

    def sync_weights(self) -> None:
        """Give the rollout the current weights as the next version."""
        self.weight_version += 1
        self._sync_weights(self.weight_version)
        self.totals.weight_syncs += 1

    def validate(self, step: int) -> Validation:
        """Evaluate on the held-out prompts and note the figures."""
        from rpcrl.trainer.validation import validate

        validation = validate(
            self.groups.sampler,
            self.reward,
            self.heldout,
            self.validation_sampling,
            step=step,
            batch_size=self.config.data.val_batch_size,
            num_samples=self.config.trainer.log_val_generations,
        )
        self.totals.saw_heldout(validation.accuracy, step=step)
        if validation.samples:
            self.run.write_samples(f"validation_{step}", validation.samples)
        self.observer.on_validate(step, validation.metrics)
        return validation

    def _validate_at_start(self, tracking: Tracking) -> None:
        if self.start_step or self.heldout is None or not self.config.trainer.val_before_train:
            return
        timer = self._timer(0)
        with timer("testing"):
            metrics = self.validate(0).metrics
        tracking.log(0, {**metrics, "timing_s/testing": timer.seconds["testing"]})

    def _timer(self, step: int) -> PhaseTimer:
        return PhaseTimer(lambda phase: self.observer.on_phase(step, phase))

    def _count(self, tokens: int, timer: PhaseTimer) -> None:
        self.totals.tokens += tokens
        self.totals.add_phases(timer.seconds)

    def _one_step(self, step: int, tracking: Tracking) -> None:
        last = step == self.total_steps
        timer = self._timer(step)
        metrics = self.step(step, timer)
        metrics["training/global_step"] = float(step)
        outside = self._timer(step)
        test_freq, save_freq = self.config.trainer.test_freq, self.config.trainer.save_freq
        if self.heldout is not None and (last or (test_freq > 0 and step % test_freq == 0)):
            with outside("testing"):
                metrics.update(self.validate(step).metrics)
        self._count(int(metrics.get("perf/total_num_tokens", 0)), timer)
        manifest = None
        if last or (save_freq > 0 and step % save_freq == 0):
            with outside("save_checkpoint"):
                manifest = self._save_shards(step)
        metrics.update({f"timing_s/{phase}": seconds for phase, seconds in outside.seconds.items()})
        self.totals.add_phases(outside.seconds)
        # the line goes out before the checkpoint counts: a run resumed from it finds the line of its last step
        tracking.log(step, metrics)
        if manifest is not None:
            self._store.publish(manifest)
        self.observer.on_step(step, metrics)

    def _save_shards(self, step: int) -> Manifest:
        directory = self._store.begin(step)
        groups = self.groups.learners()
        entries = {role: group.save_checkpoint(str(directory)) for role, group in groups.items()}
        self.totals.wall_s = self._wall_s()
        return Manifest(
            step=step,
            world={role: group.world_size for role, group in groups.items()},
            ranks=entries,
            weight_version=self.weight_version,
            data=self.train.state(),
            totals=self.totals.to_json(),
            unfinished_prompts=self.in_flight(),
            kl_coef=None if self.kl is None else self.kl.coefficient,
            settings=deciding_settings(self.config),
        )

    def _finish(self) -> dict[str, object]:
        self.observer.on_status(f"writing the model to {self.run.hf}")
        for role, group in self.groups.learners().items():
            group.export_model(str(self.run.hf if role == "actor" else self.run.hf_critic))
        return self._write_summary(self.mode, steps=self.total_steps)

    def _wall_s(self) -> float:
        return self._earlier_wall_s + time.perf_counter() - self._began_s

    def _write_summary(self, mode: str, *, steps: int) -> dict[str, object]:
        if self.groups.sync is not None:
            self.groups.sync.close()
        engine, totals = self.groups.rollout.engine_account(), self.totals
        # Linux counts in KiB
        driver_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        summary: dict[str, object] = {
            "mode": mode,
            "steps": steps,
            "wall_s": self._wall_s(),
            "phases_s": dict(totals.phases_s),
            "heldout_accuracy": {"start": totals.heldout_start, "end": totals.heldout_end},
            "weight_syncs": totals.weight_syncs,
            "tokens": totals.tokens,
            "peak_rss_bytes": {"driver": driver_bytes, **self.groups.close()},
            "rollout_engine": engine,
        }
        self.run.write_summary(summary)
        self.observer.on_end(summary)
        return summary
