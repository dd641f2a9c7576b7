"""What is a section of the configuration made of? A base class, kinds of values, and declared settings."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict

__all__ = ["Betas", "Count", "CountOrZero", "NotNegative", "Positive", "Section", "Text", "setting"]


def _number_as_text(value: object) -> object:
    """Let a name be written as a bare number (``experiment_name=7``)."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return value


Text = Annotated[str, BeforeValidator(_number_as_text)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Betas = Annotated[tuple[float, float], Strict(False)]


def setting(default: Any, text: str) -> Any:
    """Declare one setting; its description ends with the default."""
    shown = "null" if default is None else str(default).lower() if isinstance(default, bool) else default
    return Field(default=default, description=f"{text} (default: {shown})")


class Section(BaseModel):
    """Base of every part of the tree: frozen, no unknown fields, no guessing between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())
