"""The handle of a remote method: whose memory is sent, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rpcrl.dispatch.register import register, registered_methods
from rpcrl.errors import CallTimeoutError
from rpcrl.runtime.remote_method import RemoteMethod
from rpcrl.wire.codec import decode
from rpcrl.wire.imports import ImportPolicy


class Role:
    @register(timeout_s=0.01)
    def add(self, x: Any) -> None: ...


class Silent:
    run_id = "run"

    """A controller whose workers never answer."""

    imports = ImportPolicy()

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def check_usable(self) -> None: ...

    def call(self, group: str, role: str, method: str, parts: list[Any], pending: Any) -> None:
        self.parts += parts

    def place(self, payload: Any, receivers: list[str]) -> Any:
        return payload

    def cancel(self, pending: Any) -> None: ...


def test_a_call_that_timed_out_is_sent_again_as_it_was_made():
    controller = Silent()
    group = SimpleNamespace(name="g", world_size=1, router=controller, identities=("w0",))
    add = RemoteMethod(group, "r", Role, "add", registered_methods(Role)["add"])  # type: ignore[arg-type]
    x = np.zeros(1000)
    with pytest.raises(CallTimeoutError):
        add(x)
    x[:] = 1  # the method may still be sent again, or for the first time
    (args, _) = decode(controller.parts[0].payload)
    assert not args[0].any()
