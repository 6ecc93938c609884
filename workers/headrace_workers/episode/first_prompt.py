"""The fingerprint of an episode's first prompt, by which the members of a group are told to have the same task.

* The same messages and tools give the same fingerprint on every worker, whatever the renderer makes of them.
* An image counts by its content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.trajectory import Message

_encode = msgspec.json.Encoder(order="sorted").encode


def fingerprint(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
    """The fingerprint of the messages before the first turn and of the tools that it may call: 16 hexadecimal
    digits."""
    return hashlib.blake2b(_encode((messages, tools)), digest_size=8).hexdigest()
