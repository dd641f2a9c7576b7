"""How do DataProto, pydantic models and OmegaConf containers travel?

Nodes: ``[DATA_PROTO, batch, non-tensor columns, meta]``, ``[PYDANTIC, path, fields, set fields, extra, private]``,
``[OMEGACONF, plain container, read-only, struct]``. A model's fields are set as they were: no validator runs, on
either side. OmegaConf roots keep their interpolations; a part of a bigger configuration is resolved, since what it
refers to stays behind.

Nothing is imported here but for the library whose value is being written or read.
"""

from __future__ import annotations

import sys
from typing import Any

from rpcrl.errors import DecodeError
from rpcrl.wire.containers import expect
from rpcrl.wire.references import read_class, write_class
from rpcrl.wire.tree import Decoder, Encoder, Tag, Unencodable, reads, tagged, writes

__all__ = ["register_loaded"]

_optional = (dict, type(None))


def _write_data_proto(encoder: Encoder, value: Any) -> object:
    fields = encoder.attributes(
        value,
        {"batch": value.batch, "non_tensor_batch": value.non_tensor_batch, "meta_info": value.meta_info},
    )
    return tagged(Tag.DATA_PROTO, fields["batch"], fields["non_tensor_batch"], fields["meta_info"])


@reads(Tag.DATA_PROTO)
def _read_data_proto(decoder: Decoder, node: list[Any]) -> object:
    from rpcrl.batch.data_proto import DataProto  # type: ignore[import-not-found,unused-ignore]

    batch, columns, meta = expect(node, object, dict, dict)
    return DataProto(batch=batch, non_tensor_batch=columns, meta_info=meta)


def _write_model(encoder: Encoder, value: Any) -> object:
    path = write_class(encoder, value, type(value))
    declared = type(value).model_fields
    fields = encoder.attributes(value, {name: each for name, each in vars(value).items() if name in declared})
    extra, private = value.__pydantic_extra__, value.__pydantic_private__
    return tagged(
        Tag.PYDANTIC,
        path,
        fields,
        sorted(value.__pydantic_fields_set__),
        None if extra is None else encoder.attributes(value, extra),
        None if private is None else encoder.attributes(value, private),
    )


@reads(Tag.PYDANTIC)
def _read_model(decoder: Decoder, node: list[Any]) -> object:
    from pydantic import BaseModel

    path, fields, names, extra, private = expect(node, str, dict, list, _optional, _optional)
    cls = read_class(decoder, path, BaseModel)
    private_names = set(cls.__private_attributes__)
    if not fields.keys() <= cls.model_fields.keys() or not (private or {}).keys() <= private_names:
        raise DecodeError(f"the fields of {path} differ between sender and receiver")
    if (extra is None) != (cls.model_config.get("extra") != "allow"):
        raise DecodeError(f"{path} takes extra fields on one side only")
    instance = cls.__new__(cls)
    instance.__setstate__(
        {
            "__dict__": fields,
            "__pydantic_fields_set__": set(names),
            "__pydantic_extra__": extra,
            "__pydantic_private__": private,
        }
    )
    return instance


def _write_config(encoder: Encoder, value: Any) -> object:
    from omegaconf import OmegaConf

    is_part = value._get_parent() is not None
    try:
        plain = OmegaConf.to_container(value, resolve=is_part, enum_to_str=False)
    except Exception as error:
        raise Unencodable(value, f"it cannot be resolved: {error}", "call OmegaConf.resolve on it first") from error
    return tagged(Tag.OMEGACONF, encoder.node(plain), OmegaConf.is_readonly(value), OmegaConf.is_struct(value))


@reads(Tag.OMEGACONF)
def _read_config(decoder: Decoder, node: list[Any]) -> object:
    from omegaconf import OmegaConf

    flag = (bool, type(None))
    plain, readonly, struct = expect(node, (dict, list), flag, flag)
    config = OmegaConf.create(plain)
    OmegaConf.set_readonly(config, readonly)
    OmegaConf.set_struct(config, struct)
    return config


def register_loaded() -> None:
    """Register the types of those libraries that this process has loaded; called each time one is first met."""
    base_model = _loaded("pydantic.main", "BaseModel")
    if base_model is not None:
        writes(base_model, subclasses=True)(_write_model)
    kinds = [kind for kind in (_loaded("omegaconf", "DictConfig"), _loaded("omegaconf", "ListConfig")) if kind]
    if kinds:
        writes(*kinds)(_write_config)
    data_proto = _loaded("rpcrl.batch.data_proto", "DataProto")
    if data_proto is not None:
        writes(data_proto, subclasses=True)(_write_data_proto)


def _loaded(module: str, name: str) -> Any:
    """Return a class of a module that is loaded; None also while another thread is still loading it."""
    return getattr(sys.modules.get(module), name, None)
