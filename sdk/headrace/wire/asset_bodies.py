"""Several assets in one HTTP body: the response to ``POST /v1/assets``. ``messages.AssetHead`` states the layout.

* A body holds several assets, or the error in place of one.
* A truncated body is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from headrace.errors import HeadraceError, InvalidRequest, from_problem
from headrace.wire import messages
from headrace.wire.alignment import ALIGNMENT, padded

_LENGTH = struct.Struct("<I")


def pack_assets(items: Sequence[bytes | HeadraceError]) -> bytes:
    """Join assets, and the errors in place of those that could not be read, into one body."""
    heads: list[messages.AssetHead] = []
    parts: list[bytes] = []
    for item in items:
        if isinstance(item, HeadraceError):
            heads.append(messages.AssetHead(problem=item.problem()))
        else:
            heads.append(messages.AssetHead(size_bytes=len(item)))
            parts += [item, bytes(-len(item) % ALIGNMENT)]
    text = msgspec.json.encode(heads)
    return b"".join([_LENGTH.pack(len(text)), text, bytes(-(_LENGTH.size + len(text)) % ALIGNMENT), *parts])


def unpack_assets(body: bytes | memoryview) -> list[memoryview | HeadraceError]:
    """The assets in a body as read-only views of it, or the errors in their place. Raises InvalidRequest."""
    view = memoryview(body).toreadonly()
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(view)[0]
        heads = msgspec.json.decode(view[_LENGTH.size : end], type=list[messages.AssetHead])
    except (struct.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The bytes are not a body of assets: {error}.", hint="Is a proxy in between?") from error
    items: list[memoryview | HeadraceError] = []
    start = padded(end)
    for head in heads:
        if head.problem is not None:
            items.append(from_problem(head.problem))
            continue
        if head.size_bytes < 0 or start + head.size_bytes > len(view):
            raise InvalidRequest("The body of assets ends too early.", hint="It was truncated on the way; try again.")
        items.append(view[start : start + head.size_bytes])
        start += padded(head.size_bytes)
    return items
