"""How does mypy know what ``group.method(x)`` takes and returns? By this plugin.

Set ``plugins = ["rpcrl.mypy_plugin"]`` in mypy's settings. ``group`` is a ``WorkerGroup[MyWorker]``, and Python's types
cannot say that it has MyWorker's registered methods, each with another return type. The plugin says it in three steps:

1. ``register(…)`` gets the type ``Marker[shape]``: what the mode does to parameters and result, from the types of the
   arguments (``Dispatch.ONE_TO_ALL`` is a GatherMode, and so on).
2. The marker, called with the function, leaves the function's type as it is and adds the shape as an attribute, as the
   real one does. It lies in mypy's cache with the type, so that a class of another module is known too.
3. ``group.method`` looks the attribute up and becomes a ``RemoteMethod`` of the right parameters and results.

Without the plugin ``group.method`` is a ``RemoteMethod[..., Any, Any]``. mypy loads this module; rpcrl never does.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import NamedTuple

from mypy.checker import TypeChecker
from mypy.errorcodes import ATTR_DEFINED
from mypy.nodes import (
    Decorator,
    DictExpr,
    Expression,
    FuncDef,
    ListExpr,
    OverloadedFuncDef,
    SetExpr,
    StrExpr,
    SymbolNode,
    TupleExpr,
    TypeInfo,
    Var,
)
from mypy.plugin import AttributeContext, FunctionContext, MethodContext, Plugin
from mypy.typeops import bind_self
from mypy.types import (
    AnyType,
    CallableType,
    Instance,
    LiteralType,
    NoneType,
    Parameters,
    Type,
    TypedDictType,
    TypeOfAny,
    UnionType,
    get_proper_type,
)

__all__ = ["plugin"]

_GROUP = "rpcrl.runtime.worker_group.WorkerGroup"
_HANDLE = "rpcrl.runtime.worker_group.WorkerHandle"
_METHOD = "rpcrl.runtime.remote_method.RemoteMethod"
_ROLE = "rpcrl.runtime.worker_group.ClassWithInitArgs"
_FUTURE = "rpcrl.runtime.future.Future"
_REFERENCE = "rpcrl.batch.reference.BatchRef"
_BATCHES = ("rpcrl.batch.data_proto.DataProto", "tensordict._td.TensorDict", "tensordict.base.TensorDictBase")
_REGISTER = "rpcrl.dispatch.register.register"
_MARKER = "rpcrl.dispatch.register.Marker"
_NOTE = "__rpcrl_shape__"


class Shape(NamedTuple):
    """What a call through a group makes of a method ``def m(self, x: X) -> R``."""

    takes: str
    """``same``: X. ``each``: list[X] or tuple[X, …]. ``any``: parameters of these names, of any type."""
    gives: str
    """``list``: list[R]. ``one``: R. ``mean``: R if it is float or a dict of floats, else Any. ``any``."""
    call: str
    """``waits``: the plain call returns what it gives. ``future``: a Future of that. ``any``."""
    rows: str
    """``come``: batches come back. ``stay``: R is a BatchRef. ``any``."""


_SHAPE_OF_MODE = {
    "rpcrl.dispatch.mode.GatherMode": ("same", "list"),
    "rpcrl.dispatch.mode.PerRankMode": ("each", "list"),
    "rpcrl.dispatch.mode.ConcatMode": ("same", "one"),
    "rpcrl.dispatch.mode.OneMode": ("same", "one"),
}
_LISTS = (SetExpr, ListExpr, TupleExpr)
_DEFAULT = Shape("same", "list", "waits", "come")
"""Of a bare ``@register``: ONE_TO_ALL."""


def plugin(version: str) -> type[Plugin]:
    """Return the plugin's class; called by mypy."""
    return WorkerGroupPlugin


class WorkerGroupPlugin(Plugin):
    """Types ``@register``, worker groups and their methods."""

    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], Type] | None:
        """Return the hooks of ``register`` and of the constructor of WorkerGroup."""
        return {_REGISTER: _registered, _GROUP: _constructed}.get(fullname)

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        """Return the hooks of a marker's call and of ``spawn``."""
        return {f"{_MARKER}.__call__": _marked, f"{_GROUP}.spawn": _spawned}.get(fullname)

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        """Return the hook of what a group, or a handle of one worker, does not have of its own."""
        owner, _, name = fullname.rpartition(".")
        return (lambda context: _method_of(context, owner, name)) if owner in (_GROUP, _HANDLE) else None


# -- 1, 2: what is noted on a registered function ----------------------------------------------------------------------


def _registered(context: FunctionContext) -> Type:
    """Type ``register(…)`` or ``@register``."""
    result = get_proper_type(context.default_return_type)
    if isinstance(result, CallableType):
        return _with_note(result, _DEFAULT)
    if isinstance(result, Instance) and result.type.fullname == _MARKER:
        note = LiteralType(" ".join(_shape_of(context)), context.api.named_generic_type("builtins.str", []))
        return result.copy_modified(args=[note])
    return result


def _shape_of(context: FunctionContext) -> Shape:
    given = {
        name: get_proper_type(types[0])
        for name, types in zip(context.callee_arg_names, context.arg_types, strict=True)
        if name is not None and types
    }
    takes, gives = _DEFAULT.takes, _DEFAULT.gives
    mode = given.get("dispatch_mode")
    if mode is not None:
        takes, gives = _SHAPE_OF_MODE.get(mode.type.fullname if isinstance(mode, Instance) else "", ("any", "any"))
    if (execute := given.get("execute_mode")) is not None:
        which = _literal(execute)
        if which == "RANK_ZERO":
            takes, gives = "any" if takes == "any" else "same", "one"
        elif which != "ALL":
            takes, gives = "any", "any"
    if "merge" in given and gives == "list" and not isinstance(given["merge"], NoneType):
        gives = _merged(context.args[context.callee_arg_names.index("merge")][0])
    blocking = _literal(given["blocking"]) if "blocking" in given else True
    call = {True: "waits", False: "future"}.get(blocking, "any") if isinstance(blocking, bool) else "any"
    returns = _literal(given["returns"]) if "returns" in given else "value"
    rows = {"value": "come", "ref": "stay"}.get(returns, "any") if isinstance(returns, str) else "any"
    return Shape(takes, gives, call, rows)


def _merged(rules: Expression) -> str:
    """Return what the results of all ranks become by ``merge=``: one rule for all, or a dict of rules."""
    written = [value for _, value in rules.items] if isinstance(rules, DictExpr) else [rules]
    found = {rule.value if isinstance(rule, StrExpr) else "" for rule in written}
    if found <= {"first_equal", "sum"}:
        return "one"
    return "mean" if found <= {"first_equal", "sum", "mean"} else "any"


def _literal(value: Type) -> object:
    """Return the value of a literal type; None where only the type is known."""
    value = get_proper_type(value)
    if isinstance(value, Instance) and value.last_known_value is not None:
        value = value.last_known_value
    return value.value if isinstance(value, LiteralType) else None


def _marked(context: MethodContext) -> Type:
    """Type the function that a marker has marked: as it was, with the shape noted."""
    function = get_proper_type(context.default_return_type)
    marker = get_proper_type(context.type)
    if isinstance(function, CallableType) and isinstance(marker, Instance) and marker.args:
        note = _literal(marker.args[0])
        if isinstance(note, str):
            return _with_note(function, Shape(*note.split()))
    return function


def _with_note(function: CallableType, shape: Shape) -> CallableType:
    text = LiteralType(" ".join(shape), function.fallback)
    return function.copy_modified(fallback=function.fallback.copy_with_extra_attr(_NOTE, text))


def _note_of(function: CallableType) -> Shape | None:
    attributes = function.fallback.extra_attrs
    note = attributes.attrs.get(_NOTE) if attributes is not None else None
    text = _literal(note) if note is not None else None
    return Shape(*text.split()) if isinstance(text, str) else None


# -- 3: group.method ---------------------------------------------------------------------------------------------------


def _method_of(context: AttributeContext, owner: str, name: str) -> Type:
    """Type ``group.name`` or ``group.workers[0].name``, which is no attribute of the group's or handle's own."""
    default, group = context.default_attr_type, get_proper_type(context.type)
    if not isinstance(group, Instance) or group.type.get(name) is not None or context.is_lvalue:
        return default
    group = _as(group, owner)
    worker = get_proper_type(group.args[0]) if group.args else None
    if isinstance(worker, TypedDictType):
        roles = ", ".join(worker.items)
        return _fail(context, f'the group hosts several roles ({roles}): take a view first, e.g. spawn()["…"].{name}')
    if not isinstance(worker, Instance) or worker.type.fallback_to_any:
        return default
    symbol = worker.type.get(name)
    if symbol is None or symbol.node is None:
        return _fail(context, f'"{worker.type.name}" has no registered method "{name}"{_nearest(worker.type, name)}')
    return _remote_method(context, worker, name, symbol.node, of_one=owner == _HANDLE)


def _as(group: Instance, owner: str) -> Instance:
    """Return the group as WorkerGroup[…], also where it is of a class derived from that."""
    from mypy.maptype import map_instance_to_supertype

    base = next(info for info in group.type.mro if info.fullname == owner)
    return map_instance_to_supertype(group, base)


def _remote_method(context: AttributeContext, worker: Instance, name: str, node: SymbolNode, *, of_one: bool) -> Type:
    if isinstance(node, OverloadedFuncDef):
        return context.default_attr_type
    variable = node.var if isinstance(node, Decorator) else node
    if isinstance(variable, Var) and variable.type is None and not variable.is_ready and not variable.is_inferred:
        # Not reached yet: mypy comes back to this line when the class is done.
        _checker(context).handle_cannot_determine_type(name, context.context)
        return AnyType(TypeOfAny.special_form)
    declared = get_proper_type(variable.type) if isinstance(variable, Var | FuncDef) else None
    shape = _note_of(declared) if isinstance(declared, CallableType) else None
    if isinstance(declared, AnyType):
        return context.default_attr_type
    if shape is None or not isinstance(declared, CallableType):
        what = f'"{worker.type.name}.{name}" is not registered: mark it with @register to call it on a group'
        return _fail(context, what)
    if of_one:  # whatever the mode: arguments go there as they are, and the worker's own result comes back
        shape = shape._replace(takes="same", gives="one")
    return _typed(context, _bound(declared, worker, name), shape)


def _bound(method: CallableType, worker: Instance, name: str) -> CallableType:
    """Return the method without ``self``, with the type variables of a generic class filled in."""
    from mypy.expandtype import expand_type_by_instance
    from mypy.maptype import map_instance_to_supertype

    owner = next(info for info in worker.type.mro if name in info.names)
    method = expand_type_by_instance(method, map_instance_to_supertype(worker, owner))
    return bind_self(method, worker)


def _typed(context: AttributeContext, method: CallableType, shape: Shape) -> Type:
    from mypy.erasetype import erase_typevars

    any_type = AnyType(TypeOfAny.special_form)
    types, value = list(method.arg_types), _awaited(method.ret_type)
    if method.variables:
        # A generic method: its variables would have to be solved in each call.
        types, value = [erase_typevars(kind) for kind in types], erase_typevars(value)
    if shape.takes == "any":
        types = [any_type for _ in types]
    elif shape.takes == "each":
        types = [UnionType([_list(context, kind), _tuple(context, kind)]) for kind in types]
    types = [_or_deferred(context, kind) for kind in types]
    if shape.rows != "come" and not isinstance(get_proper_type(value), NoneType):
        value = _instance(context, _REFERENCE) if shape.rows == "stay" else any_type
    if shape.gives == "list":
        value = _list(context, value)
    elif shape.gives == "any" or (shape.gives == "mean" and not _is_float(value)):
        value = any_type
    future = _instance(context, _FUTURE, value)
    called = {"waits": value, "future": future}.get(shape.call, any_type)
    parameters = Parameters(types, method.arg_kinds, method.arg_names)
    return _instance(context, _METHOD, parameters, value, called)


def _or_deferred(context: AttributeContext, kind: Type) -> Type:
    """Return the type of an argument, or a Future of it; a batch may be a reference, too."""
    proper = get_proper_type(kind)
    if isinstance(proper, AnyType):
        return kind
    kinds = list(proper.items) if isinstance(proper, UnionType) else [kind]
    if any(isinstance(item := get_proper_type(one), Instance) and item.type.fullname in _BATCHES for one in kinds):
        kinds.append(_instance(context, _REFERENCE))
    # A Future is invariant: one of a member of the union is no Future of the union.
    whole = [kind] if isinstance(proper, UnionType) else []
    return UnionType.make_union([*kinds, *(_instance(context, _FUTURE, item) for item in (*kinds, *whole))])


def _list(context: AttributeContext, item: Type) -> Type:
    return context.api.named_generic_type("builtins.list", [item])


def _tuple(context: AttributeContext, item: Type) -> Type:
    return context.api.named_generic_type("builtins.tuple", [item])


def _instance(context: AttributeContext | MethodContext | FunctionContext, fullname: str, *args: Type) -> Instance:
    """Return a type of rpcrl's own; the line that is checked need not import it."""
    module, _, name = fullname.rpartition(".")
    info = _checker(context).modules[module].names[name].node
    if not isinstance(info, TypeInfo):
        raise TypeError(f"{fullname} is no class: this plugin is of another version than the package")
    return Instance(info, list(args))


def _awaited(result: Type) -> Type:
    """Return what an ``async def`` gives when it is awaited; any other result as it is."""
    proper = get_proper_type(result)
    is_coroutine = isinstance(proper, Instance) and proper.type.fullname in ("typing.Coroutine", "types.CoroutineType")
    return proper.args[2] if isinstance(proper, Instance) and is_coroutine else result


def _is_float(value: Type) -> bool:
    proper = get_proper_type(value)
    if isinstance(proper, Instance) and proper.type.fullname == "builtins.dict":
        proper = get_proper_type(proper.args[1])
    return isinstance(proper, Instance) and proper.type.fullname == "builtins.float"


def _nearest(worker: TypeInfo, name: str) -> str:
    names = []
    for info in worker.mro:
        for other, symbol in info.names.items():
            variable = symbol.node.var if isinstance(symbol.node, Decorator) else None
            declared = get_proper_type(variable.type) if variable is not None else None
            if isinstance(declared, CallableType) and _note_of(declared) is not None and not other.startswith("_"):
                names.append(other)
    near = difflib.get_close_matches(name, names, 1)
    return f'; maybe "{near[0]}"?' if near else ""


def _fail(context: AttributeContext, text: str) -> Type:
    context.api.fail(text, context.context, code=ATTR_DEFINED)
    return AnyType(TypeOfAny.from_error)


def _checker(context: AttributeContext | FunctionContext | MethodContext) -> TypeChecker:
    checker = context.api
    if not isinstance(checker, TypeChecker):
        raise TypeError(f"mypy's checker is a {type(checker).__name__}; this plugin does not know that version of mypy")
    return checker


# -- groups of several roles -------------------------------------------------------------------------------------------


def _constructed(context: FunctionContext) -> Type:
    """Type ``WorkerGroup(pool, {"actor": …, "rollout": …})`` as a group of a TypedDict of the roles' classes."""
    result = get_proper_type(context.default_return_type)
    if "worker_cls" not in context.callee_arg_names or not isinstance(result, Instance):
        return result
    given = context.args[context.callee_arg_names.index("worker_cls")]
    if not given or not isinstance(given[0], DictExpr):
        return result
    roles: dict[str, Type] = {}
    for key, value in given[0].items:
        if not isinstance(key, StrExpr):
            return result
        kind = get_proper_type(context.api.get_expression_type(value))
        if isinstance(kind, CallableType) and kind.is_type_obj():
            roles[key.value] = kind.ret_type
        elif isinstance(kind, Instance) and kind.type.fullname == _ROLE:
            roles[key.value] = kind.args[0]
        else:
            roles[key.value] = AnyType(TypeOfAny.special_form)
    return result.copy_modified(args=[_typed_dict(context, roles)])


def _spawned(context: MethodContext) -> Type:
    """Type ``group.spawn()``: a view of each role, by its name."""
    group = get_proper_type(context.type)
    roles = get_proper_type(_as(group, _GROUP).args[0]) if isinstance(group, Instance) else None
    if not isinstance(roles, TypedDictType):
        return context.default_return_type
    views: dict[str, Type] = {role: _instance(context, _GROUP, worker) for role, worker in roles.items.items()}
    given = context.args[0][0] if context.args and context.args[0] else None
    if given is None:
        return _typed_dict(context, views)
    names = [item.value for item in given.items if isinstance(item, StrExpr)] if isinstance(given, _LISTS) else []
    if isinstance(given, _LISTS) and len(names) == len(given.items) and set(names) <= set(views):
        return _typed_dict(context, {role: views[role] for role in names})
    some_group = _instance(context, _GROUP, AnyType(TypeOfAny.special_form))
    return context.api.named_generic_type(
        "builtins.dict", [context.api.named_generic_type("builtins.str", []), some_group]
    )


def _typed_dict(context: FunctionContext | MethodContext, items: dict[str, Type]) -> TypedDictType:
    return TypedDictType(items, set(items), set(), _instance(context, "typing._TypedDict"))
