"""RL post-training of language models as a plain Python program on one driver: worker groups over ZeroMQ, no Ray.

The names below load on first use: ``import rpcrl`` alone is instant and loads neither torch nor zmq nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcrl.version import __version__

__all__ = [
    "AgentLoop",
    "AgentLoopOutput",
    "BatchRef",
    "ClassWithInitArgs",
    "Controller",
    "DataProto",
    "Dispatch",
    "Execute",
    "Future",
    "ResourcePool",
    "ResourcePoolManager",
    "Worker",
    "WorkerGroup",
    "__version__",
    "as_completed",
    "mesh",
    "register",
    "register_advantage",
    "register_agent_loop",
    "register_codec",
    "register_dispatch_mode",
    "register_policy_loss",
    "update_dispatch_mode",
    "wait_all",
]

if TYPE_CHECKING:
    from rpcrl.agents.loop import AgentLoop, AgentLoopOutput
    from rpcrl.batch.data_proto import DataProto
    from rpcrl.config.registry import register_advantage, register_agent_loop, register_policy_loss
    from rpcrl.dispatch.mode import Dispatch, Execute, mesh, register_dispatch_mode, update_dispatch_mode
    from rpcrl.dispatch.register import register
    from rpcrl.runtime.controller import Controller
    from rpcrl.runtime.future import Future, as_completed, wait_all
    from rpcrl.runtime.references import BatchRef
    from rpcrl.runtime.worker import Worker
    from rpcrl.runtime.worker_group import ClassWithInitArgs, WorkerGroup
    from rpcrl.topology import ResourcePool, ResourcePoolManager
    from rpcrl.wire.codec import register_codec
else:
    # In the else branch, so that a type checker still refuses a misspelt name.
    _HOMES = {
        "AgentLoop": "rpcrl.agents.loop",
        "AgentLoopOutput": "rpcrl.agents.loop",
        "BatchRef": "rpcrl.runtime.references",
        "ClassWithInitArgs": "rpcrl.runtime.worker_group",
        "Controller": "rpcrl.runtime.controller",
        "DataProto": "rpcrl.batch.data_proto",
        "Dispatch": "rpcrl.dispatch.mode",
        "Execute": "rpcrl.dispatch.mode",
        "Future": "rpcrl.runtime.future",
        "ResourcePool": "rpcrl.topology",
        "ResourcePoolManager": "rpcrl.topology",
        "Worker": "rpcrl.runtime.worker",
        "WorkerGroup": "rpcrl.runtime.worker_group",
        "as_completed": "rpcrl.runtime.future",
        "mesh": "rpcrl.dispatch.mode",
        "register": "rpcrl.dispatch.register",
        "register_advantage": "rpcrl.config.registry",
        "register_agent_loop": "rpcrl.config.registry",
        "register_codec": "rpcrl.wire.codec",
        "register_dispatch_mode": "rpcrl.dispatch.mode",
        "register_policy_loss": "rpcrl.config.registry",
        "update_dispatch_mode": "rpcrl.dispatch.mode",
        "wait_all": "rpcrl.runtime.future",
    }

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'rpcrl' has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
