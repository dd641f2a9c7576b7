"""@register leaves a note, finds it again through inheritance, and binds arguments before anything is sent."""

import pytest

from rpcrl.dispatch.mode import Dispatch, Execute
from rpcrl.dispatch.register import bind, register, registered_methods
from rpcrl.errors import DispatchError, UsageError


class Base:
    @register
    def plain(self, x: int, *, y: int = 0) -> int:
        return x + y

    def not_registered(self) -> None: ...

    @property
    def trap(self) -> None:
        raise RuntimeError("looking for methods must not run properties")


class Child(Base):
    @register(Dispatch.DP_COMPUTE_PROTO, Execute.ALL, False, uneven="error", timeout_s=3.0)
    def batch(self, data: object) -> object:
        return data


def test_methods_are_found_by_class_with_their_settings():
    methods = registered_methods(Child)
    assert sorted(methods) == ["batch", "plain"]
    assert methods["plain"].dispatch_mode is Dispatch.ONE_TO_ALL
    spec = methods["batch"]
    assert (spec.blocking, spec.uneven, spec.timeout_s, spec.rank_zero) == (False, "error", 3.0, False)
    assert Child().plain(1, y=2) == 3, "the function is what it was"


def test_bind_shows_the_signature():
    bind(Child, "plain", (1,), {"y": 2}, call="child.plain")
    with pytest.raises(DispatchError, match=r"child\.plain\(x: int, \*, y: int = 0\) -> int: .*'z'.*nothing was sent"):
        bind(Child, "plain", (1,), {"z": 2}, call="child.plain")
    with pytest.raises(DispatchError, match="missing a required argument: 'x'"):
        bind(Child, "plain", (), {}, call="child.plain")


def test_wrong_settings_are_refused_when_the_class_is_defined():
    with pytest.raises(DispatchError, match="uneven must be one of pad, uneven, drop, error, got 'discard'"):
        register(uneven="discard")  # type: ignore[call-overload]
    with pytest.raises(DispatchError, match="execute_mode"):
        register(execute_mode="SOME")
    with pytest.raises(DispatchError, match="dispatch_mode"):
        register("ONE_TO_ALL")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="async def"):
        register(concurrent=True)(lambda self: None)
