"""How do rows of uneven lengths become one row without padding, in which none of them sees another?

The tokens of all rows stand side by side; positions count from 0 in each. A model with torch's attention is made to
attend row by row (``rpcrl.engines.packed_attention``); for any other Transformers makes a block-diagonal causal mask
(or, with flash attention, sequence bounds) from such positions. ``prepare_packing`` tries it on the loaded model
itself, before anything is trained with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rpcrl.engines.packed_attention import NAME, RowBlocks, use_row_blocks
from rpcrl.errors import BatchError, UsageError

__all__ = ["Packed", "attends_in_blocks", "prepare_packing", "require_packing"]

PROBE_LENGTHS = [5, 1, 4]
PROBE_TOLERANCE = 1e-3
"""Of the largest hidden value. Rows that see one another are off by far more."""


@dataclass(frozen=True)
class Packed:
    """Prompts and responses of some rows without pad tokens; a row's last token, which predicts nothing, is left out.

    T tokens are computed; K of them predict a response token.
    """

    input_ids: Tensor
    """``[1, T]``"""
    position_ids: Tensor
    """``[1, T]``, from 0 in each row"""
    predicting: Tensor
    """``[K]``: places among the T of the tokens before response tokens"""
    targets: Tensor
    """``[K]``: the response tokens"""
    rows: Tensor
    """``[K]``: row of each"""
    columns: Tensor
    """``[K]``: response column of each"""
    shape: tuple[int, int]
    """(n, R) of the batch"""
    row_blocks: RowBlocks | None
    """Where the rows are, for a model that attends row by row"""

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor, response_length: int, *, in_blocks: bool = False) -> Packed:
        """Pack ``[n, P + R]`` tensors whose last ``response_length`` columns are responses.

        A row without a response is not computed; where none has one, a single token is, so that ranks stay together.
        Raises BatchError for a response without a prompt token before it.
        """
        mask = attention_mask.bool()
        prompt_length = mask.shape[1] - response_length
        answered = mask[:, prompt_length:].any(-1, keepdim=True)
        rows, columns = (mask & answered).nonzero(as_tuple=True)
        tokens = input_ids[rows, columns]
        places = (mask.cumsum(-1) - 1)[rows, columns]
        followed = rows[1:] == rows[:-1]
        is_response = columns[1:] >= prompt_length
        predicts = is_response[followed]
        if int(predicts.sum()) != int(mask[:, prompt_length:].sum()):
            raise BatchError(
                "a row has a response but no prompt token, so nothing predicts its first token: packing "
                "(actor_rollout_ref.model.use_remove_padding=true) needs prompts of 1 token or more"
            )
        shown, positions = tokens[:-1][followed], places[:-1][followed]
        lengths = [count for count in torch.bincount(rows[:-1][followed]).tolist() if count]
        if not shown.numel():
            shown, positions, lengths = input_ids[0, :1], places.new_zeros(1), [1]
        return cls(
            input_ids=shown.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            predicting=predicts.nonzero().flatten(),
            targets=tokens[1:][followed][predicts],
            rows=rows[1:][followed][predicts],
            columns=columns[1:][followed][predicts] - prompt_length,
            shape=(mask.shape[0], response_length),
            row_blocks=RowBlocks.of(lengths, input_ids.device) if in_blocks else None,
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the model's call."""
        return _arguments(self.input_ids, self.position_ids, self.row_blocks)

    def pad_back(self, values: Tensor) -> Tensor:
        """Return ``[K]`` values of the predicting tokens as ``[n, R]``, zero where there is no token."""
        return values.new_zeros(self.shape).index_put((self.rows, self.columns), values)


def _arguments(input_ids: Tensor, position_ids: Tensor, row_blocks: RowBlocks | None) -> dict[str, Any]:
    arguments: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
    return arguments if row_blocks is None else {**arguments, "row_blocks": row_blocks}


def attends_in_blocks(model: Any) -> bool:
    """Say whether a model's calls need ``row_blocks``."""
    return bool(model.config._attn_implementation == NAME)


def prepare_packing(model: Any) -> None:
    """Have a model attend row by row where it can, else by a mask; raises UsageError where neither is right."""
    if use_row_blocks(model):
        try:
            require_packing(model)
            return
        except UsageError:
            model.set_attn_implementation("sdpa")
    require_packing(model)


def require_packing(model: Any) -> None:
    """Raise UsageError unless the model computes packed rows as it computes each of them alone.

    A model whose attention (or state) runs across the rows of a packed batch would train on wrong numbers.
    """
    body = getattr(model, str(getattr(model, "base_model_prefix", "")), None)
    if body is None:
        raise UsageError(f"{_REFUSED} {type(model).__name__}: its body, on which that is tried, has no known name")
    device, in_blocks = next(model.parameters()).device, attends_in_blocks(model)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    # Tokens from all over the vocabulary, no two rows alike.
    tokens = [(7919 * (index + 1)) % vocabulary for index in range(sum(PROBE_LENGTHS))]
    ids = torch.tensor(tokens, device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in PROBE_LENGTHS])

    def hidden(ids: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        row_blocks = RowBlocks.of(lengths, device) if in_blocks else None
        out = body(**_arguments(ids.unsqueeze(0), positions.unsqueeze(0), row_blocks))
        found: Tensor = out.last_hidden_state[0].double()
        return found

    try:
        with torch.no_grad():
            together = hidden(ids, positions, PROBE_LENGTHS)
            rows = zip(torch.split(ids, PROBE_LENGTHS), torch.split(positions, PROBE_LENGTHS), strict=True)
            apart = torch.cat([hidden(*row, [len(row[0])]) for row in rows])
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UsageError(f"{_REFUSED} {type(model).__name__}: a packed trial batch failed: {error}") from error
    off, size = float((together - apart).abs().max()), float(apart.abs().max())
    if not off <= PROBE_TOLERANCE * size:
        raise UsageError(
            f"{_REFUSED} {type(model).__name__}: in a packed trial batch of {len(PROBE_LENGTHS)} rows its outputs "
            f"differ by {off:.3g} (of {size:.3g}) from those of the rows alone, so the rows see one another; set "
            "actor_rollout_ref.model.use_remove_padding=false (for the critic: critic.model.use_remove_padding)"
        )


_REFUSED = "rows cannot be packed without padding (use_remove_padding) for"
