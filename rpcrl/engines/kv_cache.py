"""Where do the keys and values of sequences that are being sampled lie?

In a pool that lives as long as the engine is awake: one flat buffer per layer for keys and one for values, seen as
``[rows, heads, capacity, head_dim]``. It grows to the largest batch, and only ``free`` gives it back. Models with
sliding-window or other special layers use Transformers' own cache instead, which knows them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

__all__ = ["KvPool", "has_plain_attention"]


def has_plain_attention(config: Any) -> bool:
    """Say whether every layer of a model looks at all earlier tokens, and keeps nothing but their keys and values."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return kinds <= {"full_attention"} and not (not kinds and getattr(config, "sliding_window", None))


class _PooledLayer(DynamicLayer):  # type: ignore[misc]
    """A layer whose keys and values are written into preallocated memory instead of being concatenated."""

    keys: Any
    values: Any

    def __init__(self) -> None:
        super().__init__()
        self.flat: list[Tensor] = []
        self.slots: list[Tensor] = []
        self.capacity = 0

    def begin(self, capacity: int) -> None:
        """Forget all sequences; the next ones have at most ``capacity`` tokens."""
        self.capacity = capacity
        self.keys = self.values = None
        self.slots = []
        self.is_initialized = False

    def _slots_like(self, states: list[Tensor]) -> list[Tensor]:
        """Return empty slots for the rows of ``states`` (each [B, H, t, D]); the buffers grow if they must."""
        slots = []
        for index, state in enumerate(states):
            rows, heads, _, width = state.shape
            needed = rows * heads * self.capacity * width
            if len(self.flat) <= index:
                self.flat.append(state.new_empty(needed))
            elif self.flat[index].numel() < needed:
                self.flat[index] = state.new_empty(needed)
            slots.append(self.flat[index][:needed].view(rows, heads, self.capacity, width))
        return slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take slots for a new batch."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.slots = self._slots_like([key_states, value_states])
        self.keys, self.values = (slot[:, :, :0] for slot in self.slots)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``[B, H, t, D]`` states; returns all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        for slot, state in zip(self.slots, (key_states, value_states), strict=True):
            slot[:, :, start:end] = state
        self.keys, self.values = (slot[:, :, :end] for slot in self.slots)
        keys: Tensor = self.keys
        values: Tensor = self.values
        return keys, values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep (or repeat) the rows ``indices``."""
        if not self.is_initialized:
            return
        # index_select copies, so that the slots may overlap with what they are filled from.
        chosen = [state.index_select(0, indices) for state in (self.keys, self.values)]
        self.slots = self._slots_like(chosen)
        length = chosen[0].shape[2]
        for slot, state in zip(self.slots, chosen, strict=True):
            slot[:, :, :length] = state
        self.keys, self.values = (slot[:, :, :length] for slot in self.slots)


class KvPool:
    """The key-value memory of one model on one device."""

    def __init__(self, config: Any) -> None:
        self._config = config
        plain, count = has_plain_attention(config), int(config.num_hidden_layers)
        self._layers: list[_PooledLayer] | None = [_PooledLayer() for _ in range(count)] if plain else None

    def begin(self, capacity: int) -> Cache:
        """Return an empty cache for the next batch, of at most ``capacity`` tokens a row; ends the last one's."""
        if self._layers is None:
            return DynamicCache(config=self._config)
        for layer in self._layers:
            layer.begin(capacity)
        return Cache(layers=self._layers)

    @property
    def size_bytes(self) -> int:
        """Bytes that the pool holds now."""
        return sum(flat.nbytes for layer in self._layers or () for flat in layer.flat)

    def free(self) -> int:
        """Give all memory back; returns the freed bytes."""
        freed = self.size_bytes
        for layer in self._layers or ():
            layer.begin(0)
            layer.flat = []
        return freed
