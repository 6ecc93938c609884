"""Layouts: rows of a batch as the arrays that training code takes.

* Mask, logprobs and advantages of a row are at its own sampled positions and nowhere else.
* With ``shift`` they are one position to the left: at the position whose output predicts the token.
* A layout with one scalar per row refuses a row whose turns differ; ``split_turns`` makes rows of one turn each.
* Filler rows are flagged, and have no weight, tokens to train on, or turns.

========================  ===================  ==============================
learner                   layout               shift
========================  ===================  ==============================
TRL (asynchronous)        per row, ``packed``  no; one scalar per row
TRL (synchronous)         ``padded`` right     no; one scalar per row
verl, SkyRL               ``padded``           no
slime                     ``packed``           no
prime-rl, AReaL           ``packed``           yes
OpenRLHF                  ``padded`` right     yes
========================  ===================  ==============================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headrace.batch.batch import Row, as_float32
from headrace.errors import InvalidRequest
from headrace.trajectory import Turn


class RowLike(Protocol):
    """The attributes of a row that layouts read: a row of a batch, one from ``split_turns``, or a filler row."""

    @property
    def token_ids(self) -> npt.NDArray[np.int32]: ...
    @property
    def sampled(self) -> npt.NDArray[np.uint8]: ...
    @property
    def logprobs(self) -> npt.NDArray[np.float32]: ...
    @property
    def turns(self) -> Sequence[Turn]: ...
    @property
    def advantages(self) -> npt.NDArray[np.float64]: ...
    def token_advantages(self) -> npt.NDArray[np.float32]: ...


class Layout(NamedTuple):
    """Arrays of one shape: ``[tokens]`` packed, ``[rows, width]`` padded.

    ``token_ids`` i32; ``mask`` u8, 1 at positions to train on; ``logprobs`` and ``advantages`` f32, 0 elsewhere;
    ``position_ids`` i32, counted within the row (0 in padding); ``row_ids`` i32, the row of each position (-1 in
    padding and in filler rows).
    """

    token_ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    position_ids: npt.NDArray[np.int32]
    row_ids: npt.NDArray[np.int32]


def packed(rows: Sequence[RowLike], *, shift: bool = False) -> Layout:
    """All rows concatenated in one flat sequence. A row begins where ``position_ids`` is 0."""
    lengths = [len(row.token_ids) for row in rows]
    layout = _empty((sum(lengths),), 0)
    start = 0
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        _place(layout, slice(start, start + length), number, row, shift)
        start += length
    return layout


def padded(
    rows: Sequence[RowLike],
    *,
    side: Literal["left", "right"],
    shift: bool = False,
    width: int | None = None,
    pad_token_id: int = 0,
) -> Layout:
    """Rows padded to one width. ``side`` is the side of the padding; ``width`` defaults to the longest row.

    Raises InvalidRequest if a row is longer than ``width``: rows are never cut.
    """
    longest = max((len(row.token_ids) for row in rows), default=0)
    width = longest if width is None else width
    if longest > width:
        raise InvalidRequest(
            f"A row of {longest} tokens exceeds the width of {width}.",
            hint="Increase the width, or limit the run with max_context_tokens.",
        )
    layout = _empty((len(rows), width), pad_token_id)
    for number, row in enumerate(rows):
        length = len(row.token_ids)
        span = slice(width - length, width) if side == "left" else slice(0, length)
        _place(Layout(*(array[number] for array in layout)), span, number, row, shift)
    return layout


def scalar_advantages(rows: Sequence[RowLike]) -> npt.NDArray[np.float32]:
    """The scalar advantage of each row, f32[rows]. Raises InvalidRequest for a row whose turns have different ones."""
    scalars = np.zeros(len(rows), np.float32)
    for number, row in enumerate(rows):
        advantages = row.advantages
        if isinstance(row, FillerRow):
            continue
        if np.any(advantages != advantages[0]):
            raise InvalidRequest(
                f"Row {number} has turns with different advantages ({advantages.min():g} to {advantages.max():g}), "
                f"which a single scalar cannot represent.",
                hint="Split the rows with split_turns, or use a layout with one advantage per token, or an estimator "
                "that gives all turns of a row the same advantage.",
            )
        scalars[number] = as_float32(advantages)[0]
    return scalars


@dataclass(frozen=True, slots=True, eq=False)
class TurnRow:
    """A turn of a row as a separate row: the tokens up to its end, with only its own span sampled.

    ``token_ids`` i32[n], ``sampled`` u8[n], ``logprobs`` f32[n], ``advantages`` f64[1].
    """

    token_ids: npt.NDArray[np.int32]
    sampled: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    turns: list[Turn]
    advantages: npt.NDArray[np.float64]

    def token_advantages(self) -> npt.NDArray[np.float32]:
        """Advantages f32[n] by token."""
        by_token = np.zeros(len(self.token_ids), np.float32)
        by_token[self.turns[0].start :] = as_float32(self.advantages)[0]
        return by_token


def split_turns(rows: Iterable[RowLike]) -> list[TurnRow]:
    """Rows of one turn each, in order. No token is trained on twice, but prompts are repeated."""
    split = []
    for row in rows:
        for k, turn in enumerate(row.turns):
            sampled = np.zeros(turn.end, np.uint8)
            sampled[turn.start :] = 1
            split.append(
                TurnRow(
                    token_ids=row.token_ids[: turn.end],
                    sampled=sampled,
                    logprobs=row.logprobs[: turn.end] * sampled,
                    turns=[turn],
                    advantages=row.advantages[k : k + 1],
                )
            )
    return split


@dataclass(frozen=True, slots=True, eq=False)
class FillerRow:
    """A filler row: one padding token, nothing sampled, no turns, weight 0.

    It is for learners that need the same number of rows on every rank. It does not change a loss that sums over sampled
    positions, nor denominators from the manifest.
    """

    pad_token_id: int = 0

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """Token ids i32[1]."""
        return np.array([self.pad_token_id], np.int32)

    @property
    def sampled(self) -> npt.NDArray[np.uint8]:
        """Flags u8[1], 0."""
        return np.zeros(1, np.uint8)

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """Logprobs f32[1], 0."""
        return np.zeros(1, np.float32)

    @property
    def turns(self) -> list[Turn]:
        return []

    @property
    def advantages(self) -> npt.NDArray[np.float64]:
        """Advantages f64[0]; ``returns``, ``rewards`` and ``weights`` are empty too."""
        return np.zeros(0)

    returns = rewards = weights = advantages

    def token_advantages(self) -> npt.NDArray[np.float32]:
        """Advantages f32[1] by token, 0."""
        return np.zeros(1, np.float32)


def filled(rows: Sequence[Row], count: int, *, pad_token_id: int = 0) -> list[Row | FillerRow]:
    """The rows, followed by filler rows up to ``count`` rows, such as ``batch.shard.most_rows``.

    Filler rows are recognized by their type. Raises InvalidRequest for more rows than ``count``.
    """
    if len(rows) > count:
        raise InvalidRequest(f"{len(rows)} rows are more than {count}.", hint="Give a larger count.")
    return [*rows, *(FillerRow(pad_token_id) for _ in range(count - len(rows)))]


def _empty(shape: tuple[int, ...], pad_token_id: int) -> Layout:
    return Layout(
        token_ids=np.full(shape, pad_token_id, np.int32),
        mask=np.zeros(shape, np.uint8),
        logprobs=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
        position_ids=np.zeros(shape, np.int32),
        row_ids=np.full(shape, -1, np.int32),
    )


def _place(layout: Layout, span: slice, number: int, row: RowLike, shift: bool) -> None:
    """Write one row into its span of the one-dimensional arrays."""
    if shift and len(row.sampled) and row.sampled[0]:
        raise InvalidRequest(
            f"Row {number} starts with a sampled token, which no earlier position predicts.",
            hint="Use a layout without shift.",
        )
    layout.token_ids[span] = row.token_ids
    layout.position_ids[span] = np.arange(len(row.token_ids))
    layout.row_ids[span] = -1 if isinstance(row, FillerRow) else number
    # The first token of a row is not sampled, so shifting loses no value.
    target = slice(span.start, span.stop - 1) if shift else span
    source = slice(1, None) if shift else slice(None)
    layout.mask[target] = row.sampled[source]
    layout.logprobs[target] = row.logprobs[source]
    layout.advantages[target] = row.token_advantages()[source]
