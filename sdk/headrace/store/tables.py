"""Stored trajectories as Arrow tables and as lines of JSON, for other tools.

* A table has tokens, logprobs and rewards of the record, bit for bit.
* A line of JSON has every field of the record; in a table every field has its column, some as JSON text.
* A failed trajectory has no reward: it is null, not 0.

One row or one line is one trajectory with all its segments. Tables need ``headrace[export]``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from headrace.errors import MissingExtra
from headrace.trajectory import Message, Segment, Trajectory, Turn

if TYPE_CHECKING:
    import pyarrow as pa

TABLE_TOKENS = 4 << 20
"""Approximate tokens of one table, 36 MB: large enough for a row group, small enough for memory."""


def as_json(trajectory: Trajectory) -> bytes:
    """The trajectory as one line of JSON, without the line end; arrays become lists of numbers."""
    return msgspec.json.encode(trajectory, enc_hook=np.ndarray.tolist)


def tables(trajectories: Iterable[Trajectory]) -> Iterator[pa.Table]:
    """The trajectories in tables with the schema ``table_schema()``. Raises MissingExtra."""
    schema = table_schema()
    rows: list[dict[str, Any]] = []
    tokens = 0
    for trajectory in trajectories:
        rows.append(_row(trajectory))
        tokens += sum(len(segment.token_ids) for segment in trajectory.segments)
        if tokens >= TABLE_TOKENS:
            yield _table(rows, schema)
            rows, tokens = [], 0
    if rows:
        yield _table(rows, schema)


def table_schema() -> pa.Schema:
    """The columns of a table.

    JSON text: ``kwargs``, ``example``, ``infos``, ``arrays``, ``placeholders``, ``reward_parts``, ``tool_calls``. The
    text parts of a message are joined in ``content``, and its assets are in ``images``. Raises MissingExtra.
    """
    pa = _arrow()
    text, real, count = pa.string(), pa.float64(), pa.int64()

    def struct(**fields: Any) -> Any:
        return pa.struct(list(fields.items()))

    turn = struct(
        index=count, start=count, end=count, reward=real, reward_parts=text, terminated=pa.bool_(),
        truncated=pa.bool_(), finish_reason=text, continued=pa.list_(count), said=text,
        tool_calls=text, policy_s=real, environment_s=real,
    )  # fmt: skip
    segment = struct(
        agent=text, train=pa.bool_(), base=text, adapter=text, temperature=real, top_p=real, logprob_kind=text,
        token_ids=pa.list_(pa.int32()), sampled=pa.list_(pa.uint8()), logprobs=pa.list_(pa.float32()),
        versions=pa.list_(struct(end=count, version=text)), turns=pa.list_(turn), arrays=text, placeholders=text,
    )  # fmt: skip
    columns = struct(
        id=text, run=text, group=text, member=count, episode=text, attempt=count,
        environment=text, task=text, seed=text, tags=pa.list_(text), kwargs=text, example=text,
        status=text, stop_reason=text, failure=struct(layer=text, kind=text, message=text, retryable=pa.bool_()),
        reward=real, version_min=text, version_max=text,
        tokenizer=struct(name=text, fingerprint=text, vocab_size=count),
        messages=pa.list_(struct(role=text, content=text, images=pa.list_(text), agent=text, turn=count)),
        segments=pa.list_(segment), infos=text, control_tokens=count,
        assets=pa.list_(struct(name=text, media_type=text, size_bytes=count)),
        timing=struct(wall_s=real, working_s=real, policy_s=real, environment_s=real, waiting_s=real),
        provenance=struct(
            worker=text, endpoints=pa.list_(text), environment_version=text, headrace_version=text, evaluation=text,
            sampling_seed=text, first_prompt=text,
        ),
    )  # fmt: skip
    return pa.schema(list(columns))


def _table(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    return _arrow().Table.from_pylist(rows, schema=schema)


def _row(trajectory: Trajectory) -> dict[str, Any]:
    versions = trajectory.version_range()
    task = trajectory.task
    return {
        **_fields(trajectory, "id", "run", "group", "member", "episode", "attempt", "status", "stop_reason"),
        "environment": task.environment,
        "task": task.id,
        "seed": str(task.seed),  # as text: a seed may exceed any integer column
        "tags": task.tags,
        "kwargs": _json(task.kwargs),
        "example": None if task.example is None else _json(task.example),
        "failure": _fields(trajectory.failure, "layer", "kind", "message", "retryable"),
        "reward": _reward(trajectory),
        "version_min": versions and str(versions[0]),
        "version_max": versions and str(versions[1]),
        "tokenizer": _fields(trajectory.tokenizer, "name", "fingerprint", "vocab_size"),
        "messages": [_message(message) for message in trajectory.messages],
        "segments": [_segment(segment) for segment in trajectory.segments],
        "infos": _json(trajectory.infos),
        "control_tokens": trajectory.control_tokens,
        "assets": [_fields(asset, "name", "media_type", "size_bytes") for asset in trajectory.assets],
        "timing": _fields(trajectory.timing, "wall_s", "working_s", "policy_s", "environment_s", "waiting_s"),
        "provenance": {
            **_all_fields(trajectory.provenance),
            "sampling_seed": str(trajectory.provenance.sampling_seed),
        },
    }


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        **_fields(segment, "agent", "train", "token_ids", "sampled", "logprobs"),
        **_fields(segment.policy, "base", "adapter"),
        **_fields(segment.sampling, "temperature", "top_p"),
        "logprob_kind": segment.sampling.logprobs,
        "versions": [{"end": run.end, "version": str(run.version)} for run in segment.versions],
        "turns": [_turn(turn) for turn in segment.turns],
        "arrays": _json(segment.arrays),
        "placeholders": _json(segment.placeholders),
    }


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        **_all_fields(turn),
        "reward_parts": _json(turn.reward_parts),
        "tool_calls": _json(turn.tool_calls),
    }


def _message(message: Message) -> dict[str, Any]:
    parts = [] if isinstance(message.content, str) else message.content
    return {
        **_fields(message, "role", "agent", "turn"),
        "content": message.content if isinstance(message.content, str) else "".join(part.text for part in parts),
        "images": [part.asset for part in parts if part.asset],
    }


def _reward(trajectory: Trajectory) -> float | None:
    """The undiscounted sum over the agents that train; None if the trajectory has no reward."""
    agents = {segment.agent for segment in trajectory.rows()}
    if trajectory.status not in ("finished", "truncated") or not agents:
        return None
    turns = (turn for segment in trajectory.segments if segment.agent in agents for turn in segment.turns)
    return math.fsum(turn.reward for turn in turns)


def _fields(value: Any, *names: str) -> dict[str, Any] | Any:
    """Some fields by name; None for None."""
    return None if value is None else {name: getattr(value, name) for name in names}


def _all_fields(value: msgspec.Struct) -> dict[str, Any]:
    return _fields(value, *value.__struct_fields__)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingExtra("Tables need the package pyarrow.", hint="Run: pip install 'headrace[export]'") from error
    return pyarrow
