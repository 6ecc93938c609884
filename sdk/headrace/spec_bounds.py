"""Annotations of a spec's fields: bounds that only new specs are held to.

* A value outside of its bounds is refused, with the bounds in the message; the schema has them too.
* Specs that an earlier version accepted are read, whatever their values: a bound may be newer than they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from headrace.bounds import MAX_ENTRIES, MAX_LABEL, require_text

STORED: dict[str, bool] = {"stored": True}
"""Validation context of specs that were accepted before: they may be outside of bounds that are newer."""


@dataclass(frozen=True)
class Bound:
    """Annotation of a pydantic field: a bound that only new values are held to."""

    def check(self, value: Any) -> None:
        """Raise ValueError if the value is outside."""
        raise NotImplementedError

    def schema(self) -> dict[str, Any]:
        """The bound in words of JSON Schema."""
        raise NotImplementedError

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), **self.schema()}

    def _checked(self, value: Any, info: ValidationInfo) -> Any:
        if info.context is not STORED:
            self.check(value)
        return value


@dataclass(frozen=True)
class Between(Bound):
    """A number from ``low`` to ``high``, or 0 if ``or_zero``."""

    low: float
    high: float
    or_zero: bool = False

    def check(self, value: float) -> None:
        if not (self.low <= value <= self.high or (self.or_zero and value == 0)):
            zero = "0, or " if self.or_zero else ""
            raise ValueError(f"it is {value}; allowed is {zero}{self.low} to {self.high}")

    def schema(self) -> dict[str, Any]:
        return {"minimum": 0 if self.or_zero else self.low, "maximum": self.high}


@dataclass(frozen=True)
class Text(Bound):
    """A text of ``least`` to ``most`` characters, without control characters; with ``lines`` it may have line breaks
    and tabs."""

    most: int = MAX_LABEL
    least: int = 1
    lines: bool = False

    def check(self, value: str) -> None:
        require_text(value, self.least, self.most, lines=self.lines)

    def schema(self) -> dict[str, Any]:
        return {"minLength": self.least, "maxLength": self.most}


@dataclass(frozen=True)
class Entries(Bound):
    """A list or a map of at most ``most`` entries. They are counted before any of them is read."""

    most: int = MAX_ENTRIES

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_before_validator_function(self._checked, handler(source))

    def check(self, value: Any) -> None:
        if isinstance(value, list | tuple | dict) and len(value) > self.most:
            raise ValueError(f"it has {len(value)} entries; allowed are {self.most}")

    def schema(self) -> dict[str, Any]:
        return {"maxItems": self.most, "maxProperties": self.most}
