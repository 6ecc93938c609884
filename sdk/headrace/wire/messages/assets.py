"""Messages about images and large arrays, which workers store and learners fetch by name."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

MAX_ASSET_NAMES = 4096
"""Most names in one request."""


class AssetsRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Names of assets. A worker asks which of them are already stored, before it submits records that refer to them; a
    learner asks for their bytes."""

    names: Annotated[list[str], msgspec.Meta(max_length=MAX_ASSET_NAMES)]


class AssetHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The head of one asset in the response to ``POST /v1/assets``, or the error in its place.

    The body is ``u32 little-endian length of the JSON | JSON (list of these) | padding to 64 bytes | assets, each
    padded to 64 bytes``. It may hold only the first assets of the request, if all would be too long.
    """

    size_bytes: int = 0
    problem: dict[str, Any] | None = None


class AssetsReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``missing``: the assets to send, each with ``PUT /v1/assets/{name}``. The others are kept for ``keep_s`` seconds
    from now, and beyond that while a record refers to them that is submitted within that time."""

    epoch: int
    missing: list[str]
    keep_s: float
