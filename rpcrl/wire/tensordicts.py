"""How do TensorDicts travel, with the Python values inside them?

Nodes: ``[TENSORDICT, batch size, device, names, locked, {key: node}]``, ``[NON_TENSOR, batch size, data]``,
``[NON_TENSOR_STACK, [data]]`` for a column of one Python value per row, ``[LAZY_STACK, dimension, [tensordicts]]``.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from rpcrl.errors import DecodeError
from rpcrl.wire import tensors
from rpcrl.wire.arrays import read_shape
from rpcrl.wire.containers import expect
from rpcrl.wire.tree import Decoder, Encoder, Tag, Unencodable, reads, tagged, writes

__all__: list[str] = []

_ = tensors  # registers the columns' types


@writes(TensorDict)
def _write_tensordict(encoder: Encoder, value: TensorDict) -> object:
    keys = list(value.keys())
    encoder.enter(value)
    nodes: dict[str, object] = {}
    for key in keys:
        try:
            # `get` would unwrap Python values, and their batch size would be lost
            nodes[key] = encoder.node(value._get_str(key, None))
        except Unencodable as error:
            error.parts.append(f'["{key}"]')
            raise
    encoder.leave()
    names = list(value.names) if value._has_names() else None
    device = None if value.device is None else "cpu"
    return tagged(Tag.TENSORDICT, list(value.batch_size), device, names, bool(value.is_locked), nodes)


@reads(Tag.TENSORDICT)
def _read_tensordict(decoder: Decoder, node: list[Any]) -> object:
    optional = type(None)
    sizes, device, names, locked, values = expect(node, list, (str, optional), (list, optional), bool, dict)
    for key, value in values.items():
        if type(key) is not str or not isinstance(value, (torch.Tensor, TensorDictBase, NonTensorData)):
            raise DecodeError(f"a TensorDict cannot hold a {type(value).__qualname__} under {key!r:.100}")
    return TensorDict(values, batch_size=torch.Size(read_shape(sizes)), device=device, names=names, lock=locked)


@writes(NonTensorData)
def _write_non_tensor(encoder: Encoder, value: Any) -> object:
    return tagged(Tag.NON_TENSOR, list(value.batch_size), encoder.node(value.data))


@reads(Tag.NON_TENSOR)
def _read_non_tensor(decoder: Decoder, node: list[Any]) -> object:
    sizes, data = expect(node, list, object)
    return NonTensorData(data, batch_size=torch.Size(read_shape(sizes)))


@writes(LazyStackedTensorDict, NonTensorStack)
def _write_stack(encoder: Encoder, value: Any) -> object:
    parts = list(value.tensordicts)
    column = type(value) is NonTensorStack and value.stack_dim == 0
    if column and all(type(part) is NonTensorData and not part.batch_size for part in parts):
        return tagged(Tag.NON_TENSOR_STACK, encoder.sequence(value, [part.data for part in parts]))
    return tagged(Tag.LAZY_STACK, type(value) is NonTensorStack, value.stack_dim, encoder.sequence(value, parts))


@reads(Tag.NON_TENSOR_STACK)
def _read_column(decoder: Decoder, node: list[Any]) -> object:
    (values,) = expect(node, list)
    return NonTensorStack(*(NonTensorData(value) for value in values))


@reads(Tag.LAZY_STACK)
def _read_stack(decoder: Decoder, node: list[Any]) -> object:
    is_column, dimension, parts = expect(node, bool, int, list)
    if not all(isinstance(part, (TensorDictBase, NonTensorData)) for part in parts):
        raise DecodeError("a stack of TensorDicts consists of TensorDicts")
    kind = NonTensorStack if is_column else LazyStackedTensorDict
    return kind(*parts, stack_dim=dimension)
