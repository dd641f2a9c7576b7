"""Are the bytes on the wire still the bytes of version 1?

``golden.json`` holds the bytes of one value of every kind and one message of every kind. A difference means that the
format has changed: raise PROTOCOL_VERSION, then make the file anew with ``python -m tests.unit.wire.test_golden``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rpcrl.batch.data_proto import DataProto
from rpcrl.wire.codec import decode, encode
from rpcrl.wire.frames import from_frames, to_frames
from rpcrl.wire.messages import PROTOCOL_VERSION, Encoded
from rpcrl.wire.tree import Tag
from tests.unit.wire.samples import PARTIAL, POLICY, STANDARD_VALUES, WithCodec
from tests.unit.wire.test_frames import MESSAGES
from tests.unit.wire.test_values import register_with_codec

FILE = Path(__file__).with_name("golden.json")

VALUES: dict[str, Any] = {
    # sets of several elements have no fixed order
    **{name: value for name, value in STANDARD_VALUES.items() if not name.startswith("set")},
    "set of one": {1},
    "partial": PARTIAL,
    "custom": WithCodec([1]),
    "array": np.arange(6, dtype="<i4").reshape(2, 3),
    "long array": np.arange(300, dtype="<f8"),
    "object array": np.array(["a", None, 1], object),
    "numpy scalar": np.float32(1.5),
    "numpy dtype": np.dtype("<M8[ns]"),
    "tensor": torch.arange(3, dtype=torch.bfloat16),
    "long tensor": torch.arange(300, dtype=torch.float64),
    "jagged": torch.nested.nested_tensor([torch.ones(1, 2), torch.zeros(2, 2)], layout=torch.jagged),
    "nested": torch.nested.nested_tensor([torch.ones(1), torch.zeros(2)]),
    "torch dtype": torch.float8_e4m3fn,
    "device": torch.device("cuda:0"),
    "size": torch.Size([2, 3]),
    "tensordict": TensorDict({"a": torch.ones(1), "n": NonTensorData("x"), "s": NonTensorStack("y")}, [1]),
    "lazy stack": torch.stack([NonTensorStack("y"), NonTensorStack("z")]),
    "data proto": DataProto(batch=None, non_tensor_batch={"u": np.array(["a"], object)}, meta_info={"k": 1}),
}


def written(encoded: Encoded) -> list[str]:
    return [bytes(part).hex() for part in (encoded.tree, *encoded.buffers)]


def current() -> dict[str, Any]:
    register_with_codec()
    return {
        "version": PROTOCOL_VERSION,
        "values": {name: written(encode(value, imports=POLICY)) for name, value in VALUES.items()},
        "messages": {name: [bytes(f).hex() for f in to_frames(message)] for name, message in MESSAGES.items()},
    }


GOLDEN: dict[str, Any] = json.loads(FILE.read_text(encoding="ascii")) if FILE.exists() else {}


def test_nothing_is_missing_from_the_file() -> None:
    assert GOLDEN["version"] == PROTOCOL_VERSION
    assert GOLDEN["values"].keys() == VALUES.keys()
    assert GOLDEN["messages"].keys() == MESSAGES.keys()


@pytest.mark.parametrize("name", VALUES)
def test_value_bytes(name: str) -> None:
    register_with_codec()
    frozen = GOLDEN["values"][name]
    assert written(encode(VALUES[name], imports=POLICY)) == frozen
    tree, *buffers = (bytes.fromhex(part) for part in frozen)
    assert type(decode(Encoded(tree, tuple(buffers)), imports=POLICY)) is type(VALUES[name])


@pytest.mark.parametrize("name", MESSAGES)
def test_message_bytes(name: str) -> None:
    frozen = [bytes.fromhex(part) for part in GOLDEN["messages"][name]]
    assert [bytes(frame) for frame in to_frames(MESSAGES[name])] == frozen
    assert from_frames(frozen) == MESSAGES[name]


def test_every_tag_is_frozen() -> None:
    """Each tag's mark appears in the file, so no number can change unseen. OmegaConf is tested elsewhere."""
    text = "".join(part for parts in GOLDEN["values"].values() for part in parts)
    missing = [tag.name for tag in Tag if f"c700{int(tag):02x}" not in text]
    assert missing == ["OMEGACONF"]


if __name__ == "__main__":
    FILE.write_text(json.dumps(current(), indent=1) + "\n", encoding="ascii")
