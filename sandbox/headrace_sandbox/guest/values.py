"""Values as JSON, on both sides of a sandbox's boundary: JSON values unchanged, others under the name of their kind.

The text of this file also precedes programs that run inside; it needs only Python.
"""

from __future__ import annotations

from typing import Any


def encode(value: Any) -> Any:
    """Encode a value as JSON data. Raises TypeError for a value that is not data."""
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else {"int": hex(value)}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return {"set": [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"map": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist())
    raise TypeError(f"{type(value).__name__} is not data")


def decode(node: Any) -> Any:
    """Decode trusted data."""
    if isinstance(node, list):
        return [decode(item) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "int":
        return int(content, 16)
    if kind == "set":
        return {decode(item) for item in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    return {decode(key): decode(item) for key, item in content}
