"""A group of one worker in this process: the real roles and dispatch modes, without processes and wire."""

from __future__ import annotations

from contextlib import contextmanager

from rpcrl.dispatch.mode import Arguments, CallShape
from rpcrl.dispatch.register import registered_methods
from rpcrl.dispatch.splitting import unpad_result
from rpcrl.runtime.worker import WorkerContext, set_context


class LocalGroup:
    """Calls the registered methods of one role object as a group of one rank would."""

    world_size = 1

    def __init__(self, role):
        self.role = role

    def __getattr__(self, name):
        spec = registered_methods(type(self.role)).get(name)
        if spec is None:
            raise AttributeError(name)

        def call(*args, **kwargs):
            shape = CallShape(name, spec.uneven, spec.rank_zero)
            dispatched = spec.dispatch_mode.dispatch(self, shape, Arguments(args, kwargs))
            part = dispatched.per_rank[0]
            outputs = [getattr(self.role, name)(*part.args, **part.kwargs)]
            result = outputs[0] if spec.rank_zero else spec.dispatch_mode.collect(self, shape, outputs)
            return unpad_result(result, dispatched.num_padding, 0, call=name)

        return call


@contextmanager
def local_groups(classes):
    """Build ``{role: (class, args, kwargs)}`` in this process; yields ``{role: LocalGroup}``."""
    context = WorkerContext(
        identity="local.0",
        group="local",
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        device="cpu",
    )
    set_context(context)
    try:
        for role, (cls, args, kwargs) in classes.items():
            context.roles[role] = cls(*args, **kwargs)
        yield {role: LocalGroup(instance) for role, instance in context.roles.items()}
    finally:
        set_context(None)
