"""Do numpy arrays, torch tensors, TensorDicts and batches arrive as they were: dtype, shape, values, writable, own?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from rpcrl.batch.data_proto import DataProto
from rpcrl.wire.codec import decode, encode
from rpcrl.wire.messages import Encoded


def round_trip(value: Any) -> Any:
    """Through bytes, as over a socket: read-only frames."""
    encoded = encode(value)
    return decode(Encoded(bytes(encoded.tree), tuple(bytes(buffer) for buffer in encoded.buffers)))


DTYPES = [
    "?",
    "i1",
    "i2",
    "i4",
    "i8",
    "u1",
    "u2",
    "u4",
    "u8",
    "f2",
    "f4",
    "f8",
    "g",
    "c8",
    "c16",
    "M8[ns]",
    "M8[D]",
    "m8[s]",
    "S5",
    "U3",
    "V4",
    ">f4",
    ">i8",
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_arrays(dtype: str) -> None:
    for shape in ((), (0,), (0, 3), (3,), (40, 50), (2, 1, 3)):
        check_array(dtype, shape)


def check_array(dtype: str, shape: tuple[int, ...]) -> None:
    data = np.random.default_rng(0).integers(0, 2, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
    array = np.frombuffer(data.tobytes(), dtype).reshape(shape) if data.size else np.empty(shape, dtype)
    back = round_trip(array)
    assert (type(back), back.dtype, back.shape) == (np.ndarray, array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


def test_numpy_layouts() -> None:
    base = np.arange(10_000).reshape(100, 100)
    for array in (base[::2, ::-3], base.T, np.asfortranarray(base), np.broadcast_to(base[0], (5, 100)), base[3:3]):
        back = round_trip(array)
        assert np.array_equal(back, array)
        back += 1
    frozen = base.copy()
    frozen.flags.writeable = False
    assert round_trip(frozen).flags.writeable
    assert np.array_equal(round_trip(np.array([], dtype="U0")), np.array([], dtype="U1"))


def test_numpy_scalars_and_dtypes() -> None:
    for value in (
        np.float32(1.5),
        np.int64(-1),
        np.bool_(True),
        np.datetime64("2024-01-01"),
        np.str_("ab"),
        np.complex64(1j),
    ):
        back = round_trip(value)
        assert type(back) is type(value)
        assert back == value
    assert type(round_trip(np.str_(""))) is np.str_
    for dtype in ("f4", ">i2", "O", "M8[ns]"):
        assert round_trip(np.dtype(dtype)) == np.dtype(dtype)


def test_object_arrays_hold_anything_in_one_list() -> None:
    column = np.empty(5, object)
    column[:] = ["text", None, {"k": (1,)}, np.arange(3), [1, 2]]
    back = round_trip(column)
    assert back.shape == (5,)
    assert list(back[:3]) == ["text", None, {"k": (1,)}]
    assert np.array_equal(back[3], np.arange(3))
    assert back[4] == [1, 2]
    same_length = np.empty(2, object)
    same_length[:] = [[1, 2], [3, 4]]
    assert round_trip(same_length).shape == (2,)
    assert round_trip(np.array([["a", 1], [None, 2.5]], object)).tolist() == [["a", 1], [None, 2.5]]
    assert round_trip(np.empty((0, 2), object)).shape == (0, 2)
    assert round_trip(np.array("zero-d", object)).item() == "zero-d"
    strings = np.array([f"row {number}" for number in range(10_000)], object)
    encoded = encode(strings)
    assert not encoded.buffers
    assert len(encoded.tree) < 11 * 10_000


def torch_dtypes() -> list[torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted((dtype for dtype in found if not str(dtype).startswith("torch.q")), key=str)


@pytest.mark.parametrize("dtype", torch_dtypes(), ids=str)
def test_tensors(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (2, 0), (3,), (40, 50)):
        check_tensor(dtype, shape)


def check_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 2, count, dtype=np.uint8))
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    back = round_trip(tensor)
    assert (type(back), back.dtype, back.shape, back.device.type) == (torch.Tensor, dtype, tensor.shape, "cpu")
    assert back.reshape(-1).view(torch.uint8).tolist() == raw.tolist()


def test_tensor_layouts() -> None:
    base = torch.arange(10_000.0).reshape(100, 100)
    values = (base.T, base[::2, ::3], base[0].expand(5, 100), base.to(torch.complex64).conj(), base[5, 5])
    for tensor in values:
        back = round_trip(tensor)
        assert torch.equal(back, tensor.resolve_conj())
        back.add_(1)
    parameter = torch.nn.Parameter(base)
    back = round_trip({"w": parameter, "grown": parameter * 2})
    assert type(back["w"]) is torch.Tensor
    assert not back["w"].requires_grad
    assert not back["grown"].requires_grad
    assert torch.equal(back["w"], base)


def test_what_arrives_belongs_to_the_receiver() -> None:
    tensor = torch.ones(1000)
    encoded = encode((tensor, tensor.numpy()))
    first, second = decode(encoded)
    first.zero_()
    second[:] = 0
    assert tensor.sum() == 1000
    assert memoryview(encoded.buffers[0]).nbytes == 4000
    tensor.fill_(2)
    assert decode(encoded)[0][0] == 2  # encoding makes views: it is sending that takes the values over


def test_torch_things() -> None:
    for value in (torch.bfloat16, torch.device("cuda:1"), torch.device("cpu"), torch.Size([2, 3]), torch.Size([])):
        back = round_trip(value)
        assert back == value
        assert type(back) is type(value)


def jagged(*lengths: int, features: int = 3) -> torch.Tensor:
    rows = [torch.arange(length * features, dtype=torch.float32).reshape(length, features) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def test_jagged_tensors() -> None:
    tensor = jagged(2, 0, 4)
    back = round_trip(tensor)
    assert back.layout is torch.jagged
    assert [part.tolist() for part in back.unbind()] == [part.tolist() for part in tensor.unbind()]
    transposed = round_trip(tensor.transpose(1, 2))
    assert (transposed._ragged_idx, transposed.shape[1]) == (2, 3)
    assert [part.tolist() for part in transposed.unbind()] == [part.T.tolist() for part in tensor.unbind()]
    # views with gaps: offsets and lengths
    narrow = torch.nested.narrow(
        torch.arange(20.0).reshape(2, 10), 1, torch.tensor([1, 2]), torch.tensor([3, 4]), layout=torch.jagged
    )
    assert [part.tolist() for part in round_trip(narrow).unbind()] == [part.tolist() for part in narrow.unbind()]


def test_jagged_columns_that_shared_their_offsets_still_do() -> None:
    first = jagged(2, 5)
    other = jagged(1, 1)
    back = round_trip({"a": first, "x": other, "b": first * 2, "y": other + 1})
    assert torch.equal((back["a"] + back["b"]).values(), first.values() * 3)
    assert torch.equal((back["x"] + back["y"]).values(), other.values() * 2 + 1)
    strided = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    assert [part.tolist() for part in round_trip(strided).unbind()] == [[1, 1], [0, 0, 0]]


def test_tensordicts() -> None:
    value = TensorDict(
        {
            "a": torch.ones(2, 3),
            "nested": TensorDict({"b": torch.zeros(2, 4)}, [2]),
            "text": NonTensorData({"k": (1,)}, batch_size=[2]),
            "rows": NonTensorStack("p", ("q", 1)),
            "jagged": jagged(1, 2),
        },
        batch_size=[2],
        names=["batch"],
        device="cpu",
    )
    value.lock_()
    back = round_trip(value)
    assert type(back) is TensorDict
    assert (back.batch_size, back.names, back.device, back.is_locked) == (
        value.batch_size,
        ["batch"],
        torch.device("cpu"),
        True,
    )
    assert list(back.keys()) == list(value.keys())
    assert torch.equal(back["nested", "b"], value["nested", "b"])
    assert back["text"] == {"k": (1,)}
    assert back["rows"] == ["p", ("q", 1)]
    assert round_trip(TensorDict({}, [])).batch_size == torch.Size([])
    lazy = LazyStackedTensorDict(TensorDict({"x": torch.ones(2)}), TensorDict({"x": torch.ones(3)}), stack_dim=0)
    assert [part["x"].shape[0] for part in round_trip(lazy).tensordicts] == [2, 3]


def test_data_proto() -> None:
    column = np.array(["a", {"b": 1}, None], object)
    batch = DataProto(
        batch=TensorDict({"ids": torch.arange(6).reshape(3, 2)}, [3]),
        non_tensor_batch={"uid": column},
        meta_info={"temperature": 0.5, "shape": (1, 2)},
    )
    back = round_trip(batch)
    assert type(back) is DataProto
    assert torch.equal(back.batch["ids"], batch.batch["ids"])
    assert back.non_tensor_batch["uid"].tolist() == column.tolist()
    assert back.meta_info == {"temperature": 0.5, "shape": (1, 2)}
    assert len(round_trip(DataProto(batch=None, non_tensor_batch={"uid": column}, meta_info={}))) == 3


@pytest.mark.gpu
def test_cuda_tensors_arrive_on_the_cpu() -> None:
    tensor = torch.arange(10_000, device="cuda", dtype=torch.bfloat16)
    back = round_trip({"t": tensor, "d": TensorDict({"t": tensor}, [10_000], device="cuda")})
    assert back["t"].device.type == "cpu"
    assert torch.equal(back["t"], tensor.cpu())
    assert back["d"]["t"].device.type == "cpu"
