"""Are two values the same, and where do they first differ?

Deep: containers entry by entry, arrays and tensors element by element with dtype and shape, NaN equal to NaN,
cyclic structures once. Used where two batches must agree: union, concat, and tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from rpcrl.batch.rows import is_tensor

__all__ = ["first_difference", "shortened"]

_Seen = set[tuple[int, int]]


def first_difference(left: Any, right: Any) -> str | None:
    """Return where and how two values first differ, e.g. ``at [3, 1]: 2 and 5``; None if nowhere."""
    return _difference(left, right, "", set())


def shortened(value: object, limit: int = 60) -> str:
    """Return ``repr(value)``, cut to ``limit`` characters; of large tensors and arrays only type and shape."""
    size = getattr(value, "size", 0)
    if is_tensor(value) or (isinstance(value, np.ndarray) and size > 8):
        shape = tuple(getattr(value, "shape", ()))
        return f"{type(value).__name__} {getattr(value, 'dtype', '')} of shape {shape}"
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _difference(left: Any, right: Any, path: str, seen: _Seen) -> str | None:
    if left is right:
        return None
    if is_tensor(left) or is_tensor(right):
        return _tensor_difference(left, right, path)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return _array_difference(left, right, path, seen)
    if _is_container(left) and type(left) is type(right):
        if (id(left), id(right)) in seen:  # a cycle: already being compared further up
            return None
        seen.add((id(left), id(right)))
        if hasattr(left, "batch_size"):
            return _mapping_difference(dict(left.items()), dict(right.items()), path, seen)
        if isinstance(left, Mapping):
            return _mapping_difference(left, right, path, seen)
        if isinstance(left, list | tuple):
            return _sequence_difference(left, right, path, seen)
        return _mapping_difference(vars(left), vars(right), path, seen)
    return None if _same_leaf(left, right) else _at(path, f"{shortened(left)} and {shortened(right)}")


def _is_container(value: Any) -> bool:
    if isinstance(value, dict | list | tuple) or (hasattr(value, "batch_size") and hasattr(value, "items")):
        return True  # the last is a TensorDict
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")


def _same_leaf(left: Any, right: Any) -> bool:
    try:
        if bool(left == right):
            return True
        return bool(left != left) and bool(right != right)  # NaN, the only value unlike itself
    except Exception:  # a type whose == does not answer: only identity could have made the two the same
        return False


def _at(path: str, text: str) -> str:
    return f"at {path}: {text}" if path else text


def _mapping_difference(left: Mapping[Any, Any], right: Mapping[Any, Any], path: str, seen: _Seen) -> str | None:
    for key in [*left, *(key for key in right if key not in left)]:
        if key not in left or key not in right:
            side = "second" if key not in right else "first"
            return _at(path, f"key {key!r} is missing in the {side}")
        found = _difference(left[key], right[key], f"{path}[{key!r}]", seen)
        if found is not None:
            return found
    return None


def _sequence_difference(left: Any, right: Any, path: str, seen: _Seen) -> str | None:
    if len(left) != len(right):
        return _at(path, f"lengths {len(left)} and {len(right)}")
    for number, (one, other) in enumerate(zip(left, right, strict=True)):
        found = _difference(one, other, f"{path}[{number}]", seen)
        if found is not None:
            return found
    return None


def _array_difference(left: Any, right: Any, path: str, seen: _Seen) -> str | None:
    if not (isinstance(left, np.ndarray) and isinstance(right, np.ndarray)):
        return _at(path, f"types {type(left).__name__} and {type(right).__name__}")
    if left.shape != right.shape:
        return _at(path, f"shapes {left.shape} and {right.shape}")
    if left.dtype != right.dtype:
        return _at(path, f"dtypes {left.dtype} and {right.dtype}")
    if left.dtype == object:
        for index in np.ndindex(left.shape):
            found = _difference(left[index], right[index], f"{path}{list(index)}", seen)
            if found is not None:
                return found
        return None
    unequal = left != right
    if left.dtype.kind in "fcmM":
        unequal &= ~((left != left) & (right != right))
    if not unequal.any():
        return None
    index = tuple(int(number) for number in np.argwhere(unequal)[0])
    return _at(f"{path}{list(index)}", f"{left[index]!r} and {right[index]!r}")


def _tensor_difference(left: Any, right: Any, path: str) -> str | None:
    if not (is_tensor(left) and is_tensor(right)):
        return _at(path, f"types {type(left).__name__} and {type(right).__name__}")
    if left.is_nested or right.is_nested:
        return _jagged_difference(left, right, path)
    if left.shape != right.shape:
        return _at(path, f"shapes {tuple(left.shape)} and {tuple(right.shape)}")
    if left.dtype != right.dtype:
        return _at(path, f"dtypes {left.dtype} and {right.dtype}")
    if left.device != right.device:
        right = right.to(left.device)
    if left.is_floating_point() and left.itemsize == 1:  # eight-bit floats know no comparison
        left, right = left.float(), right.float()
    if str(left.dtype) in ("torch.uint16", "torch.uint32", "torch.uint64"):  # nor do these
        left, right = left.cpu().numpy(), right.cpu().numpy()
        return _array_difference(left, right, path, set())
    unequal = left != right
    if (left.is_floating_point() or left.is_complex()) and bool(unequal.any()):
        unequal &= ~((left != left) & (right != right))
    if not bool(unequal.any()):
        return None
    index = tuple(int(number) for number in unequal.nonzero()[0])
    return _at(f"{path}{list(index)}", f"{left[index].item()!r} and {right[index].item()!r}")


def _jagged_difference(left: Any, right: Any, path: str) -> str | None:
    if left.is_nested != right.is_nested:
        return _at(path, "one is jagged and the other is not")
    if left.ndim != right.ndim or left._ragged_idx != right._ragged_idx:
        return _at(path, f"shapes {tuple(left.shape)} and {tuple(right.shape)}")
    if left.shape[0] != right.shape[0]:
        return _at(path, f"row counts {left.shape[0]} and {right.shape[0]}")
    for number, (one, other) in enumerate(zip(left.unbind(), right.unbind(), strict=True)):
        found = _tensor_difference(one, other, f"{path}[{number}]")
        if found is not None:
            return found
    return None
