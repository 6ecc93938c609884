"""Layouts: rows of a batch as the arrays that training code takes.

* A row's mask, logprobs and advantages stand at the row's own sampled positions and nowhere else.
* Shifted, they stand one to the left: at the position whose output predicts the token.
* A layout of one scalar per row refuses a row whose turns differ; ``split_turns`` makes rows of one turn each.
* Filler rows are flagged, weigh nothing, count nowhere and are copies of nothing.

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
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headrace.errors import InvalidRequest
from headrace.trajectory import Turn

if TYPE_CHECKING:
    from headrace.batch.batch import Row


class RowLike(Protocol):
    """What a layout reads of a row: a row of a batch, one of ``split_turns``, or a filler."""

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

    ``token_ids`` i32; ``mask`` u8, 1 where there is something to train on; ``logprobs`` and ``advantages`` f32, 0
    elsewhere; ``position_ids`` i32, counted within the row (0 in padding); ``row_ids`` i32, the row that a position
    belongs to (-1 in padding and in fillers).
    """

    token_ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    position_ids: npt.NDArray[np.int32]
    row_ids: npt.NDArray[np.int32]


def packed(rows: Sequence[RowLike], *, shift: bool = False) -> Layout:
    """All rows end to end in one flat sequence. Row boundaries are where ``position_ids`` is 0."""
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
    """One row per line. ``side`` is where the padding goes; ``width`` defaults to the longest row.

    Raises InvalidRequest if a row is longer than ``width``: a row that was cut is not what was sampled.
    """
    longest = max((len(row.token_ids) for row in rows), default=0)
    width = longest if width is None else width
    if longest > width:
        raise InvalidRequest(
            f"A row of {longest} tokens does not fit into a width of {width}.",
            hint="Make the layout wider, or limit the run with max_context_tokens.",
        )
    layout = _empty((len(rows), width), pad_token_id)
    for number, row in enumerate(rows):
        length = len(row.token_ids)
        span = slice(width - length, width) if side == "left" else slice(0, length)
        _place(Layout(*(array[number] for array in layout)), span, number, row, shift)
    return layout


def scalar_advantages(rows: Sequence[RowLike]) -> npt.NDArray[np.float32]:
    """One advantage per row, f32[rows]. Raises InvalidRequest for a row whose turns have different ones."""
    scalars = np.zeros(len(rows), np.float32)
    for number, row in enumerate(rows):
        advantages = row.advantages
        if isinstance(row, FillerRow):
            continue
        if np.any(advantages != advantages[0]):
            raise InvalidRequest(
                f"Row {number} has turns with different advantages ({advantages.min():g} to {advantages.max():g}), "
                f"which one scalar cannot hold.",
                hint="Split the rows with split_turns, use a layout with one advantage per token, or an estimator "
                "that gives all turns the same.",
            )
        scalars[number] = advantages[0]
    return scalars


@dataclass(frozen=True, slots=True, eq=False)
class TurnRow:
    """One turn of a row as a row of its own: the tokens up to its end, and only its own span sampled.

    ``token_ids`` i32[n], ``sampled`` u8[n], ``logprobs`` f32[n], ``advantages`` f64[1].
    """

    token_ids: npt.NDArray[np.int32]
    sampled: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    turns: list[Turn]
    advantages: npt.NDArray[np.float64]

    def token_advantages(self) -> npt.NDArray[np.float32]:
        """f32[n]."""
        found = np.zeros(len(self.token_ids), np.float32)
        found[self.turns[0].start :] = self.advantages[0]
        return found


def split_turns(rows: Iterable[RowLike]) -> list[TurnRow]:
    """A row for every turn, in order. No token is trained on twice, but prompts are repeated."""
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
    """A row that is none: one padding token, nothing sampled, no turns, weight 0.

    For learners that need as many rows on every rank. A loss that sums over sampled positions, and denominators from
    the manifest, do not see it.
    """

    pad_token_id: int = 0

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """i32[1]."""
        return np.array([self.pad_token_id], np.int32)

    @property
    def sampled(self) -> npt.NDArray[np.uint8]:
        """u8[1], 0."""
        return np.zeros(1, np.uint8)

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """f32[1], 0."""
        return np.zeros(1, np.float32)

    @property
    def turns(self) -> list[Turn]:
        return []

    @property
    def advantages(self) -> npt.NDArray[np.float64]:
        """f64[0], and so are ``returns``, ``rewards`` and ``weights``."""
        return np.zeros(0)

    returns = rewards = weights = advantages

    def token_advantages(self) -> npt.NDArray[np.float32]:
        """f32[1], 0."""
        return np.zeros(1, np.float32)


def filled(rows: Sequence[Row], count: int, *, pad_token_id: int = 0) -> list[Row | FillerRow]:
    """The rows, and fillers behind them up to ``count``, such as ``batch.shard.most_rows``; a filler is known by its
    type. Raises InvalidRequest where there are more rows already."""
    if len(rows) > count:
        raise InvalidRequest(f"There are {len(rows)} rows already, more than {count}.", hint="Fill up to more.")
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
    """Write one row into its span of one-dimensional arrays."""
    if shift and len(row.sampled) and row.sampled[0]:
        raise InvalidRequest(
            f"Row {number} samples its first token, and nothing stands before it that could predict it.",
            hint="Use a layout without shift.",
        )
    layout.token_ids[span] = row.token_ids
    layout.position_ids[span] = np.arange(len(row.token_ids))
    layout.row_ids[span] = -1 if isinstance(row, FillerRow) else number
    # The first token of a row is never sampled, so nothing leaves the row to the left.
    target = slice(span.start, span.stop - 1) if shift else span
    source = slice(1, None) if shift else slice(None)
    layout.mask[target] = row.sampled[source]
    layout.logprobs[target] = row.logprobs[source]
    layout.advantages[target] = row.token_advantages()[source]
