"""A record with a value in nearly every field, as a third-party worker might submit it."""

from __future__ import annotations

import msgspec
import numpy as np

from headrace.assets import AssetData, encode_array, make_asset
from headrace.common.ids import new_id
from headrace.trajectory import (
    ContentPart,
    Message,
    Placeholder,
    Provenance,
    Sampling,
    ToolCall,
    Trajectory,
)
from headrace.wire.messages import Assignment
from tests.builders import make_multi_segment, replace_segment, replace_turn

IMAGE = make_asset(b"bytes of an image", "image/png")
ARRAY = encode_array(np.arange(12, dtype=np.uint8).reshape(4, 3))
ASSETS: tuple[AssetData, ...] = (IMAGE, ARRAY)
"""Assets of the record."""


def full_record(attempt: Assignment, worker: str) -> Trajectory:
    """The record of that attempt: two segments, an image in the prompt, an array about its tokens, tool calls."""
    names = ("run", "group", "member", "episode", "attempt", "task")
    record = make_multi_segment(
        id=new_id(),
        messages=[
            Message(role="system", content="Answer."),
            Message(role="user", content=[ContentPart(type="image", text="<image>", asset=IMAGE.name)], agent="agent"),
            Message(role="assistant", content="two", agent="agent", turn=0),
            Message(role="tool", content="2", agent="agent"),
        ],
        assets=[data.entry for data in ASSETS],
        infos=[{"depth": {"list": [1, 2.5, None, True]}}],
        provenance=Provenance(
            worker=worker,
            endpoints=["http://127.0.0.1:1"],
            environment_version="7",
            headrace_version="0.1.0",
            sampling_seed=attempt.sampling_seed,
        ),
        **{name: getattr(attempt, name) for name in names},
    )
    record = _with_a_tool(record)
    for segment in (0, 1):
        record = replace_segment(
            record,
            segment=segment,
            sampling=Sampling(temperature=1.0, top_p=0.75, seed=11),
        )
    record = replace_segment(record, placeholders=[Placeholder(1, 3, IMAGE.name)])
    timing = msgspec.structs.replace(record.timing, waiting_s=0.125)
    return msgspec.structs.replace(
        replace_segment(record, segment=1, arrays={"routed_experts": ARRAY.name}), timing=timing
    )


def _with_a_tool(record: Trajectory) -> Trajectory:
    turn = record.segments[0].turns[0]
    tool_calls = [
        ToolCall(name="add", arguments={"numbers": [1, 1]}, result="2", duration_s=0.25),
        ToolCall(name="divide", arguments={"by": 0}, error="division by zero"),
    ]
    return replace_turn(
        record,
        0,
        tool_calls=tool_calls,
        continued=[turn.start + 1],
        said="two\n\nand more",
        reward_parts={"right": 0.75, "long": -0.25},
        finish_reason="stop",
        policy_s=0.5,
        environment_s=0.0625,
    )
