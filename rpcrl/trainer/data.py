"""Which prompts does step k train on? A pure function of the data, the seed and the position.

``PromptEncoder`` turns rows into a batch of left-padded prompts, ``PromptLoader`` walks over the training prompts in
batches. The loader keeps no generator: its whole state is (epoch, batch), so a resumed run reads what the uninterrupted
one would have read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rpcrl.batch.data_proto import DataProto
from rpcrl.errors import BatchError, CheckpointError, UsageError
from rpcrl.trainer.prompt_files import AGENT_FIELDS, PromptSource, Row

__all__ = ["PromptEncoder", "PromptLoader", "heldout_batch", "permutation", "usable_rows"]


class PromptEncoder:
    """Turns rows into token ids with a model's tokenizer and chat template.

    A prompt of chat messages goes through the template, with the opening of the answer; a string is tokenised as it
    is. Raises UsageError when messages meet a tokenizer without a template, or when there is no padding token.
    """

    def __init__(self, tokenizer: Any, max_prompt_length: int) -> None:
        self._tokenizer = tokenizer
        self.max_prompt_length = max_prompt_length
        """P, tokens: the number of columns of every batch."""
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        if pad is None:
            raise UsageError(
                "the model's tokenizer has neither a padding nor an end token; set pad_token in its folder"
            )
        self._pad_token_id = int(pad)

    def token_ids(self, row: Row) -> list[int]:
        """Return the tokens of a row's prompt, of whatever length."""
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return [int(token) for token in self._tokenizer.encode(prompt)]
        if not self._tokenizer.chat_template:
            raise UsageError(
                "the prompts are chat messages, and the model's tokenizer has no chat template; give the prompts as "
                "strings, or put a chat_template.jinja into the model's folder"
            )
        text = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        # The template writes the special tokens itself.
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def batch(self, rows: Sequence[Row], uids: Sequence[str]) -> DataProto:
        """Return rows as a batch.

        Tensors: ``input_ids`` and ``attention_mask`` [B, P] int64, left-padded. Non-tensors: ``uid``,
        ``data_source``, ``ground_truth``, ``reward_model``, ``raw_prompt``, ``extra_info``, and ``agent_name`` and
        ``sampling_params`` where a row has one. Raises BatchError for a prompt longer than P.
        """
        shape = (len(rows), self.max_prompt_length)
        input_ids = torch.full(shape, self._pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros(shape, dtype=torch.int64)
        for number, (row, uid) in enumerate(zip(rows, uids, strict=True)):
            tokens = self.token_ids(row)
            if not 0 < len(tokens) <= self.max_prompt_length:
                raise BatchError(
                    f"prompt {uid} has {len(tokens)} tokens, allowed are 1 to data.max_prompt_length="
                    f"{self.max_prompt_length}"
                )
            input_ids[number, -len(tokens) :] = torch.tensor(tokens)
            attention_mask[number, -len(tokens) :] = 1
        return DataProto.from_dict(
            tensors={"input_ids": input_ids, "attention_mask": attention_mask},
            non_tensors={
                "uid": list(uids),
                "data_source": [row["data_source"] for row in rows],
                "ground_truth": [row["reward_model"]["ground_truth"] for row in rows],
                "reward_model": [row["reward_model"] for row in rows],
                "raw_prompt": [row["prompt"] for row in rows],
                "extra_info": [row["extra_info"] for row in rows],
                **{name: [row.get(name) for row in rows] for name in AGENT_FIELDS if any(name in row for row in rows)},
            },
        )


def usable_rows(
    source: PromptSource, encoder: PromptEncoder, *, filter_overlong_prompts: bool
) -> tuple[int, ...] | None:
    """Return the numbers of the rows whose prompt is not longer than P; None for a source without end.

    Without ``filter_overlong_prompts`` a longer prompt is an error: BatchError with their number, the longest, and
    the first one's place. A source without end is checked batch by batch.
    """
    if source.size is None:
        return None
    lengths = [len(encoder.token_ids(source.row(index))) for index in range(source.size)]
    limit = encoder.max_prompt_length
    kept = tuple(index for index, length in enumerate(lengths) if length <= limit)
    if len(kept) == len(lengths):
        return kept
    first = next(index for index, length in enumerate(lengths) if length > limit)
    account = (
        f"{len(lengths) - len(kept)} of {len(lengths)} prompts of {source.name} are longer than data.max_prompt_length="
        f"{limit} tokens (the longest has {max(lengths)}, the first is row {first} with {lengths[first]})"
    )
    if not filter_overlong_prompts:
        raise BatchError(f"{account}; set data.max_prompt_length={max(lengths)} or data.filter_overlong_prompts=true")
    if not kept:
        raise BatchError(f"{account}; none is left")
    return kept


class PromptLoader:
    """Training prompts in batches of ``batch_size``, epoch after epoch, without end.

    Each epoch is a new permutation of all rows when ``shuffle`` is set, else their own order; the rows that do not
    fill a last batch are left out of that epoch. A source without end has one epoch that never ends, and is not
    shuffled: its rows are random already. Raises UsageError when there are fewer usable rows than ``batch_size``.
    """

    def __init__(
        self,
        source: PromptSource,
        encoder: PromptEncoder,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        filter_overlong_prompts: bool = False,
    ) -> None:
        self._source = source
        self._encoder = encoder
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._rows = usable_rows(source, encoder, filter_overlong_prompts=filter_overlong_prompts)
        self._epoch = 0
        self._batch = 0
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None
        self._prepared: tuple[tuple[int, int], DataProto] | None = None
        if self._rows is not None and len(self._rows) < batch_size:
            raise UsageError(
                f"{source.name} has {len(self._rows)} usable prompts, fewer than one batch of data.train_batch_size="
                f"{batch_size}; lower it or give more prompts"
            )

    @property
    def num_filtered(self) -> int:
        """Number of rows that were left out because their prompt is too long."""
        return 0 if self._rows is None or self._source.size is None else self._source.size - len(self._rows)

    @property
    def batches_per_epoch(self) -> int | None:
        """Number of whole batches in an epoch; None when the epoch has no end."""
        return None if self._rows is None else len(self._rows) // self._batch_size

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._epoch

    def __iter__(self) -> Iterator[DataProto]:
        while True:
            yield self.next_batch()

    def next_batch(self) -> DataProto:
        """Return the next batch [B, P] and move on; see ``PromptEncoder.batch``.

        ``uid`` is ``EPOCH-ROW``: the same in a resumed run, unique in the run, without an underscore. When a row
        cannot be encoded the position stays where it was.
        """
        self.prepare()
        batch = self._prepared[1] if self._prepared is not None else self._encoded()
        self._prepared = None
        self._batch += 1
        if self._batch == self.batches_per_epoch:
            self._epoch, self._batch = self._epoch + 1, 0
        return batch

    def prepare(self) -> None:
        """Encode the next batch ahead, e.g. while workers train; the position stays where it is."""
        place = (self._epoch, self._batch)
        if self._prepared is None or self._prepared[0] != place:
            self._prepared = (place, self._encoded())

    def _encoded(self) -> DataProto:
        positions = range(self._batch * self._batch_size, (self._batch + 1) * self._batch_size)
        numbers = [self._row_at(position) for position in positions]
        rows = [self._source.row(number) for number in numbers]
        return self._encoder.batch(rows, [f"{self._epoch}-{number}" for number in numbers])

    def prompts(self, uids: Sequence[str]) -> DataProto:
        """Return prompts that ``next_batch`` has given before, by their uids; the position stays where it is.

        Raises CheckpointError for a uid that is none of this source's.
        """
        numbers = []
        for uid in uids:
            epoch, _, number = uid.partition("-")
            usable = self._rows is None or (number.isdecimal() and int(number) in self._rows)
            if not (epoch.isdecimal() and number.isdecimal() and usable):
                raise CheckpointError(
                    f"prompt {uid!r} is not one of {self._source.name}; resume with the data of the run that drew it"
                )
            numbers.append(int(number))
        return self._encoder.batch([self._source.row(number) for number in numbers], list(uids))

    def state(self) -> dict[str, int | str | bool | None]:
        """Return the position as plain JSON, with what it is a position in."""
        return {"epoch": self._epoch, "batch": self._batch, **self._identity()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position that ``state()`` returned.

        Raises CheckpointError, and stays where it is, when it belongs to other data, another batch size or seed.
        """
        for name, mine in self._identity().items():
            if name not in state or state[name] != mine:
                raise CheckpointError(
                    f"the checkpoint's data position has {name}={state.get(name)!r}, this run has {mine!r}; resume "
                    "with the settings and data of the run that wrote it"
                )
        epoch, batch = state.get("epoch"), state.get("batch")
        whole = self.batches_per_epoch
        if type(epoch) is not int or type(batch) is not int or epoch < 0 or not 0 <= batch < (whole or batch + 1):
            raise CheckpointError(
                f"the checkpoint's data position is epoch={epoch!r} batch={batch!r}; an epoch has "
                f"{whole or 'endless'} batches"
            )
        self._epoch, self._batch = epoch, batch

    def _identity(self) -> dict[str, int | str | bool | None]:
        return {
            "num_rows": None if self._rows is None else len(self._rows),
            "batch_size": self._batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _row_at(self, position: int) -> int:
        if self._rows is None:
            return position
        if not self._shuffle:
            return self._rows[position]
        if self._order is None or self._order[0] != self._epoch:
            self._order = (self._epoch, permutation(len(self._rows), seed=self._seed, epoch=self._epoch))
        return self._rows[int(self._order[1][position])]


def heldout_batch(source: PromptSource, encoder: PromptEncoder, *, filter_overlong_prompts: bool = False) -> DataProto:
    """Return all held-out prompts as one batch, in their own order; ``uid`` is ``heldout-ROW``."""
    numbers = usable_rows(source, encoder, filter_overlong_prompts=filter_overlong_prompts)
    if numbers is None:
        raise UsageError(f"{source.name} has no end and cannot be held out")
    return encoder.batch([source.row(number) for number in numbers], [f"heldout-{number}" for number in numbers])


def permutation(count: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the order of an epoch: 0 … count−1, permuted.

    Rows are sorted by a 64-bit hash (splitmix64's finaliser) of (seed, epoch, row): the same with every version of
    numpy, which does not hold for its own generators.
    """
    rows = np.arange(count, dtype=np.uint64)
    key = _mixed(_mixed(np.array([seed % 2**64], dtype=np.uint64)) ^ np.uint64(epoch))
    return np.argsort(_mixed(rows ^ key), kind="stable").astype(np.int64)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return splitmix64's hash of each value; uint64 arithmetic wraps around."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
