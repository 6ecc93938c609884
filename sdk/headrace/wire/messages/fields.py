"""Types of fields of requests, with the bounds that their decoder checks."""

from __future__ import annotations

from typing import Annotated

import msgspec

from headrace.bounds import MAX_ENTRIES, MAX_LABEL, MAX_REFERENCE, MAX_SECONDS, MAX_TEMPERATURE

RequestLabel = Annotated[str, msgspec.Meta(max_length=MAX_LABEL)]

CallKey = Annotated[str, msgspec.Meta(max_length=MAX_LABEL)]
"""A name of one call, made by the client, by which the service recognizes a repeat."""

Labels = Annotated[list[RequestLabel], msgspec.Meta(max_length=MAX_ENTRIES)]

RequestReference = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REFERENCE)]
"""A path, an address, or another text of one line."""

Note = Annotated[str, msgspec.Meta(max_length=MAX_REFERENCE)]
"""A text for people."""

Duration = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
"""Seconds."""

RequestTemperature = Annotated[float, msgspec.Meta(ge=0, le=MAX_TEMPERATURE)]

Gauges = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=MAX_REFERENCE)], float], msgspec.Meta(max_length=MAX_ENTRIES)
]
"""Numbers by name."""
