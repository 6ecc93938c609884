"""Ids in few bytes: a run may hold those of a million trajectories.

* Packed ids of any form come back the same, in their order.
* A UUID as Headrace writes it takes 16 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

_UUIDS = re.compile("(?:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})*")
_UUID_CHARS = 36
_HEX_CHARS = 32

_UUIDS_MARK = b"\xc1"
"""First byte where UUIDs follow; msgpack never begins with it."""

_decoder = msgspec.msgpack.Decoder(list[str])


def pack(ids: Sequence[str]) -> bytes:
    """The ids as bytes."""
    joined = "".join(ids)
    if all(len(id) == _UUID_CHARS for id in ids) and _UUIDS.fullmatch(joined):
        return _UUIDS_MARK + bytes.fromhex(joined.replace("-", ""))
    return msgspec.msgpack.encode(ids)


def unpack(packed: bytes) -> list[str]:
    """The ids that were packed; raises msgspec.DecodeError for other bytes."""
    if packed[:1] != _UUIDS_MARK:
        return _decoder.decode(packed)
    text = packed.hex()
    return [
        f"{text[at : at + 8]}-{text[at + 8 : at + 12]}-{text[at + 12 : at + 16]}-{text[at + 16 : at + 20]}-"
        f"{text[at + 20 : at + 32]}"
        for at in range(2 * len(_UUIDS_MARK), len(text), _HEX_CHARS)
    ]
