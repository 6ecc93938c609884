"""Values as JSON, on both sides of a sandbox's wall: what JSON has as it is, anything else under the name of its kind.

The text of this file is also put before programs that run inside; it needs nothing but Python.
"""

from __future__ import annotations

from typing import Any


def encoded(value: Any) -> Any:
    """The value as JSON-able data. Raises TypeError for a value that is not data."""
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else {"int": hex(value)}
    if isinstance(value, (list, tuple)):
        return [encoded(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return {"set": [encoded(item) for item in value]}
    if isinstance(value, dict):
        return {"map": [[encoded(key), encoded(item)] for key, item in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encoded(value.tolist())
    raise TypeError(f"{type(value).__name__} is not data")


def decoded(node: Any) -> Any:
    """The value of data that is trusted."""
    if isinstance(node, list):
        return [decoded(item) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "int":
        return int(content, 16)
    if kind == "set":
        return {decoded(item) for item in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    return {decoded(key): decoded(item) for key, item in content}
