"""Ids in few bytes: a run may hold those of a million trajectories.

* Whatever ids are packed come back the same, in their order.
* A UUID as Headrace writes it takes 16 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

_UUIDS = re.compile("(?:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})*")
_UUID_CHARS = 36
_HEX_CHARS = 32

_PLAIN = b"\xc1"
"""What no msgpack begins with: UUIDs follow."""

_decoder = msgspec.msgpack.Decoder(list[str])


def pack(ids: Sequence[str]) -> bytes:
    """The ids as bytes."""
    joined = "".join(ids)
    if all(len(id) == _UUID_CHARS for id in ids) and _UUIDS.fullmatch(joined):
        return _PLAIN + bytes.fromhex(joined.replace("-", ""))
    return msgspec.msgpack.encode(ids)


def unpack(packed: bytes) -> list[str]:
    """The ids that were packed; raises msgspec.DecodeError for bytes that are none."""
    if packed[:1] != _PLAIN:
        return _decoder.decode(packed)
    text = packed.hex()
    return [
        f"{text[at : at + 8]}-{text[at + 8 : at + 12]}-{text[at + 12 : at + 16]}-{text[at + 16 : at + 20]}-"
        f"{text[at + 20 : at + 32]}"
        for at in range(2 * len(_PLAIN), len(text), _HEX_CHARS)
    ]
