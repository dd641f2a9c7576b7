"""What are the steps of RL post-training? A batch goes in, a batch with more columns comes out.

Every trainer is a program over these functions; a mode only decides when each runs and when weights move. They use
no more of a batch than ``select``, ``union``, ``chunk``, ``split``, ``concat``, ``repeat`` and ``[]``, plus the few
columns that the driver itself needs. N = prompts × n samples, P prompt columns, R response columns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from rpcrl.algorithms.advantages import estimate_advantages, get_advantage
from rpcrl.algorithms.kl import FixedKl, KlController, kl_in_reward
from rpcrl.algorithms.rollout_correction import importance_weights, rollout_metrics
from rpcrl.batch.data_proto import DataProto
from rpcrl.errors import BatchError
from rpcrl.trainer.balancing import dealt, in_balance
from rpcrl.trainer.metrics import reduce_metrics, tensors_of
from rpcrl.trainer.mini_batches import equal_mini_batches

if TYPE_CHECKING:
    from rpcrl.config.run import Algorithm, RolloutCorrection

__all__ = [
    "Sampling",
    "TextDecoder",
    "advantage",
    "generate",
    "old_log_prob",
    "ref_log_prob",
    "request_rows",
    "reward",
    "rollout_correction",
    "update_actor",
    "update_critic",
    "update_weights",
    "values",
    "with_prompts",
]

ACTOR_COLUMNS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "responses",
    "response_mask",
)
"""What a model needs to give the responses their log-probs or values."""

HAND_OVER_S = 0.001
"""How long the driver waits for its I/O thread to send a call before it computes beside it."""

REWARD_COLUMNS = ("response_text", "data_source", "ground_truth", "extra_info", "finish_reason")
"""What a reward function is told; nothing else is sent."""


class TextDecoder(Protocol):
    """The part of a tokenizer that turns responses into text."""

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each sequence of token ids."""
        ...


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled."""

    n: int
    """Samples per prompt."""
    do_sample: bool
    temperature: float
    top_p: float
    top_k: int
    response_length: int
    """Longest response, tokens."""
    seed: int

    def meta_info(self, step: int) -> dict[str, object]:
        """Return the settings as a rollout engine reads them."""
        return {
            "do_sample": self.do_sample,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "response_length": self.response_length,
            "seed": self.seed,
            "global_steps": step,
        }


def _object_array(values: Sequence[object]) -> np.ndarray[Any, np.dtype[np.object_]]:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def generate(rollout: Any, prompts: DataProto, sampling: Sampling, *, step: int, validate: bool = False) -> DataProto:
    """Sample n responses per prompt; returns N rows, the n of a prompt side by side.

    ``prompts`` has ``input_ids``/``attention_mask`` [B, P] and a non-tensor ``uid`` per prompt. The result has the
    prompt's non-tensor columns, ``sample_index`` (0 … n−1), and what ``RolloutEngine.generate`` adds; its meta_info
    has ``weight_version`` and the ``temperature`` that the log-probs belong to. Agent loops
    (``rpcrl.agents.manager``) get all columns, and may return several rows for a sample: then there are more.
    Raises BatchError when a sample is missing.
    """
    whole = getattr(rollout, "reads_prompts", False)
    repeated, request = request_rows(prompts, sampling, step=step, whole=whole)
    if whole:
        request.meta_info["validate"] = validate
    sampled: DataProto = rollout.generate_sequences(request)
    return with_prompts(repeated, sampled, sampling, weight_version=sampled.meta_info["weight_version"])


def request_rows(
    prompts: DataProto, sampling: Sampling, *, step: int, whole: bool = False
) -> tuple[DataProto, DataProto]:
    """Return the prompts n times each, and the rows of them that a rollout is asked to sample.

    ``whole`` gives these all columns, as agent loops want them.
    """
    repeated = prompts.repeat(sampling.n, interleave=True)
    index = _object_array([row % sampling.n for row in range(len(repeated))])
    repeated.non_tensor_batch["sample_index"] = index
    request = DataProto(
        batch=repeated.select(batch_keys=["input_ids", "attention_mask"], non_tensor_batch_keys=[]).batch,
        non_tensor_batch=dict(repeated.non_tensor_batch)
        if whole
        else {"uid": repeated.non_tensor_batch["uid"], "sample_index": index},
        meta_info=sampling.meta_info(step),
    )
    return repeated, request


def with_prompts(repeated: DataProto, sampled: DataProto, sampling: Sampling, **meta_info: object) -> DataProto:
    """Return what was sampled beside the columns of its prompts; see ``generate``."""
    own = dict(sampled.non_tensor_batch)
    rows = [int(row) for row in own.pop("request_row", range(len(sampled)))]
    if len(set(rows)) != len(repeated) or rows != sorted(rows):
        raise BatchError(f"the rollout returned {len(set(rows))} rows for {len(repeated)} requests")
    given = {name: column[rows] for name, column in repeated.non_tensor_batch.items()}
    return DataProto(
        batch=sampled.batch,
        non_tensor_batch={**given, **own, "sample_index": given["sample_index"]},
        # The temperature goes along: whoever scores these samples again must do it under the same distribution.
        meta_info={**meta_info, "temperature": sampling.temperature if sampling.do_sample else 1.0},
    )


def decode_responses(batch: DataProto, decoder: TextDecoder) -> list[str]:
    """Return each row's response as text, without special tokens and padding."""
    tokens = tensors_of(batch)["responses"].tolist()
    # what the policy did not sample (a tool's answer) is a part of the response, and 0 in its mask
    lengths = tensors_of(batch)["attention_mask"][:, -len(tokens[0]) :].sum(-1).tolist() if tokens else []
    rows = [row[: int(length)] for row, length in zip(tokens, lengths, strict=True)]
    return decoder.batch_decode(rows, skip_special_tokens=True)


def reward(
    workers: Any | None, batch: DataProto, decoder: TextDecoder, *, model: Any | None = None, model_weight: float = 1.0
) -> DataProto:
    """Score each response; adds ``token_level_scores`` [N, R] (the score on the last response token).

    ``workers`` run the reward function, ``model`` is a group of reward models, and both work at the same time. The
    score is the function's plus ``model_weight`` × the model's number (column ``rm_score``), or that of the only one.
    Where agent loops have given the rows a ``reward_score``, that is the score, and nobody is asked.
    Also adds the non-tensor columns ``response_text`` and whatever else the reward workers return.
    """
    texts = _object_array(decode_responses(batch, decoder))
    known = batch.non_tensor_batch.get("reward_score")
    columns = {**batch.non_tensor_batch, "response_text": texts}
    request = DataProto(batch=None, non_tensor_batch=columns, meta_info={})
    scored = {"score": known} if known is not None else _scores_of(workers, model, request, model_weight)
    taken = sorted(set(scored) & set(columns))
    if taken:
        raise BatchError(
            f"the reward function returned the field {', '.join(map(repr, taken))}, which is a column of the batch "
            "already; give the field another name"
        )
    scores = torch.tensor([float(value) for value in scored["score"]], dtype=torch.float32)
    mask = tensors_of(batch)["response_mask"]
    token_scores = torch.zeros(mask.shape, dtype=torch.float32)
    # the last token that the policy sampled; a response without one has its score on a column that no loss reads
    last = (mask.shape[1] - 1 - mask.bool().flip(-1).int().argmax(-1)) * mask.bool().any(-1)
    token_scores[torch.arange(len(scores)), last] = scores
    return batch.union(
        DataProto.from_dict(
            tensors={"token_level_scores": token_scores}, non_tensors={"response_text": texts, **scored}
        )
    )


def _scores_of(workers: Any | None, model: Any | None, request: DataProto, model_weight: float) -> dict[str, Any]:
    """Return ``score`` and the further fields of each row."""
    if model is None:
        if workers is None:
            raise BatchError("there are neither reward workers nor a reward model to score these responses")
        return dict(workers.compute_reward(_told(request, REWARD_COLUMNS)).non_tensor_batch)
    pending = model.compute_rm_score.submit(_told(request, ("raw_prompt", "response_text")))
    scored = {} if workers is None else dict(workers.compute_reward(_told(request, REWARD_COLUMNS)).non_tensor_batch)
    rm_score = pending.result().non_tensor_batch["rm_score"]
    if "score" in scored:
        both = zip(scored["score"], rm_score, strict=True)
        score = [float(own) + model_weight * float(more) for own, more in both]
    else:
        score = [float(value) for value in rm_score]
    return {**scored, "score": _object_array(score), "rm_score": rm_score}


def _told(request: DataProto, names: Sequence[str]) -> DataProto:
    """Return the columns that the scorer of a batch reads, of those that are there."""
    return request.select(non_tensor_batch_keys=[name for name in names if name in request.non_tensor_batch])


def _scored(method: Any, ranks: int, batch: DataProto, *, balance: bool) -> DataProto:
    """Return what a model makes of each row, in the batch's order; ``balance`` deals rows out by length."""
    rows = batch.select(batch_keys=list(ACTOR_COLUMNS), non_tensor_batch_keys=[])
    result: DataProto = in_balance(method, rows, ranks) if balance else method(rows)
    return result


def old_log_prob(actor: Any, batch: DataProto, *, recompute: bool, balance: bool = False) -> DataProto:
    """Add ``old_log_probs`` [N, R]: the sampler's own, or with ``recompute`` those of the trainer's model.

    ``balance``, here and below, gives the ranks rows with about the same number of tokens; the result is the same.
    """
    if recompute:
        scored = _scored(actor.compute_log_prob, actor.world_size, batch, balance=balance)
        return batch.union(scored.select(batch_keys=["old_log_probs"]))
    sampler = tensors_of(batch)["rollout_log_probs"]
    return batch.union(DataProto.from_dict(tensors={"old_log_probs": sampler.clone()}))


def rollout_correction(batch: DataProto, settings: RolloutCorrection) -> tuple[DataProto, dict[str, float]]:
    """Compare ``old_log_probs`` with the sampler's; with ``rollout_is`` add ``rollout_is_weights`` [N, R].

    Returns the batch and ``rollout_corr/*``.
    """
    columns = tensors_of(batch)
    old, rollout, mask = columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"]
    metrics = rollout_metrics(old, rollout, mask)
    if settings.rollout_is is None:
        return batch, metrics
    weights, more = importance_weights(
        old,
        rollout,
        mask,
        level=settings.rollout_is,
        threshold=settings.rollout_is_threshold,
        batch_normalize=settings.rollout_is_batch_normalize,
    )
    return batch.union(DataProto.from_dict(tensors={"rollout_is_weights": weights})), {**metrics, **more}


def ref_log_prob(reference: Any, batch: DataProto, *, balance: bool = False) -> DataProto:
    """Add ``ref_log_prob`` [N, R]: log-probs under the frozen reference policy."""
    scored = _scored(reference.compute_ref_log_prob, reference.world_size, batch, balance=balance)
    return batch.union(scored.select(batch_keys=["ref_log_prob"]))


def values(critic: Any, batch: DataProto, *, balance: bool = False) -> DataProto:
    """Add ``values`` [N, R]: what the critic expects before each response token."""
    scored = _scored(critic.compute_values, critic.world_size, batch, balance=balance)
    return batch.union(scored.select(batch_keys=["values"]))


def advantage(
    batch: DataProto, algorithm: Algorithm, *, kl: KlController | None = None
) -> tuple[DataProto, dict[str, float]]:
    """Add ``token_level_rewards``, ``advantages`` and ``returns``, each [N, R]; runs on the driver.

    With ``use_kl_in_reward`` the KL to the reference is taken off the scores first, and its mean is reported; ``kl``
    gives it its weight and hears of the mean (None: the weight of the configuration). The estimator may read every
    column of the batch. Raises UsageError when it needs one that is not there.
    """
    columns = tensors_of(batch)
    mask = columns["response_mask"]
    metrics: dict[str, float] = {}
    rewards = columns["token_level_scores"]
    if algorithm.use_kl_in_reward:
        kl = kl or FixedKl(algorithm.kl_ctrl.kl_coef)
        coefficient = kl.coefficient
        rewards, mean_kl = kl_in_reward(
            rewards,
            columns["old_log_probs"],
            columns["ref_log_prob"],
            mask,
            kl_coef=coefficient,
            kind=algorithm.kl_penalty,
        )
        metrics = {"actor/reward_kl_penalty": float(mean_kl), "actor/reward_kl_penalty_coeff": coefficient}
        kl.update(float(mean_kl), len(batch))
    advantages, returns = estimate_advantages(
        get_advantage(algorithm.adv_estimator),
        {
            **batch.non_tensor_batch,
            **columns,
            "token_level_rewards": rewards,
            "gamma": algorithm.gamma,
            "lam": algorithm.lam,
            "norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo,
        },
    )
    added = {"token_level_rewards": rewards.clone(), "advantages": advantages, "returns": returns}
    return batch.union(DataProto.from_dict(tensors=added)), metrics


def update_critic(
    critic: Any,
    batch: DataProto,
    *,
    mini_batch_rows: int,
    epochs: int,
    lr: float,
    balance: bool = False,
    meanwhile: Callable[[], object] | None = None,
) -> dict[str, float]:
    """Make ``len(batch) / mini_batch_rows × epochs`` optimizer steps of the critic; returns ``critic/*`` figures.

    Reads ``values`` and ``returns``; mini-batches are made as those of ``update_actor`` are.
    """
    columns = [*ACTOR_COLUMNS, "values", "returns"]
    parts = _updates(
        critic.update_critic,
        critic.world_size,
        batch,
        columns,
        {"lr": lr},
        mini_batch_rows=mini_batch_rows,
        epochs=epochs,
        balance=balance,
        meanwhile=meanwhile,
    )
    return _update_metrics("critic", parts)


def update_actor(
    actor: Any,
    batch: DataProto,
    *,
    mini_batch_rows: int,
    epochs: int,
    lr: float,
    temperature: float,
    extra_columns: Sequence[str] = (),
    balance: bool = False,
    meanwhile: Callable[[], object] | None = None,
) -> dict[str, float]:
    """Make ``len(batch) / mini_batch_rows × epochs`` optimizer steps; returns ``actor/*`` figures.

    ``meanwhile`` is called while the workers train: what the driver has to do then costs the step no time.

    Rows go to mini-batches in their order, so which rows make a mini-batch depends neither on the number of ranks nor
    on micro-batches; each is normalised by its own counts, so its loss does not either.
    Raises BatchError when the rows do not divide into mini-batches of that size, or these over the ranks.
    """
    columns = [*ACTOR_COLUMNS, "old_log_probs", "advantages", *extra_columns]
    meta = {"lr": lr, "temperature": temperature}
    parts = _updates(
        actor.update_actor,
        actor.world_size,
        batch,
        columns,
        meta,
        mini_batch_rows=mini_batch_rows,
        epochs=epochs,
        balance=balance,
        meanwhile=meanwhile,
    )
    return _update_metrics("actor", parts)


def _updates(
    update: Any,
    world_size: int,
    batch: DataProto,
    columns: list[str],
    meta: Mapping[str, float],
    *,
    mini_batch_rows: int,
    epochs: int,
    balance: bool,
    meanwhile: Callable[[], object] | None,
) -> list[dict[str, float]]:
    """Have all mini-batches of a step trained, in one call; returns the figures of each, in order."""
    indexed = [name for name in ("output_index",) if name in batch.non_tensor_batch]
    rows = batch.select(batch_keys=columns, non_tensor_batch_keys=indexed, meta_info_keys=[])
    rows, size = equal_mini_batches(rows, mini_batch_rows, ranks=world_size)
    rows = dealt(rows, world_size, mini_batch_rows=size, balance=balance)
    facts = {**meta, "num_mini_batches": len(rows) // size, "ppo_epochs": epochs}
    request = DataProto(batch=rows.batch, non_tensor_batch={}, meta_info=facts)
    per_rank: list[list[Mapping[str, float]]]
    if meanwhile is None:
        per_rank = update(request)
    else:
        running = update.submit(request)
        # A thread that computes keeps the interpreter for 5 ms at a time: the one that sends the call goes first.
        threading.Event().wait(HAND_OVER_S)
        meanwhile()
        per_rank = running.result()
    return [reduce_metrics(of_all_ranks) for of_all_ranks in zip(*per_rank, strict=True)]


def _update_metrics(name: str, parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    metrics = {f"{name}/{figure}": value for figure, value in reduce_metrics(parts).items()}
    metrics[f"{name}/num_updates"] = float(len(parts))
    if f"{name}/skipped" in metrics:
        metrics[f"{name}/skipped"] *= len(parts)
    return metrics


def update_weights(rollout: Any, *, version: int) -> None:
    """Give the rollout the trainer's current weights, as ``version``; a sleeping rollout wakes first.

    ``rollout`` is a group that takes them in place, or the way to one in other processes (``WeightSync``).
    """
    rollout.update_weights(version)
