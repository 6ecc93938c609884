"""Checks and copies of the results of an environment."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.assets import Image
from headrace.environment import Step
from headrace.errors import EnvironmentFailure
from headrace.trajectory import ContentPart, ToolCall
from headrace_workers.episode import environment_adapter
from headrace_workers.episode.environment_adapter import AGENT
from headrace_workers.episode.json_copies import MAX_ITEMS, MAX_NAMED, MAX_TEXT, json_part


def _step(**changes: Any) -> Step:
    return Step("obs", 1.0, False, False, {})._replace(**changes)


@pytest.mark.parametrize("reward", [None, True, np.bool_(True), "1", [1.0], 1j])
def test_a_reward_that_is_not_a_number_is_a_failure(reward: Any) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        environment_adapter.read_step(_step(reward=reward))
    assert (caught.value.kind, caught.value.retryable) == ("reward-not-a-number", False)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, np.float32("nan"), 10**400])
def test_a_reward_that_is_not_finite_is_a_failure(reward: Any) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        environment_adapter.read_step(_step(reward=reward))
    assert caught.value.kind == "reward-not-finite"


@pytest.mark.parametrize("reward", [1.1e12, -1e13, 1e60, 10**200, np.float64(1e300)])
def test_a_reward_that_statistics_cannot_hold_is_a_failure(reward: Any) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        environment_adapter.read_step(_step(reward=reward))
    assert (caught.value.kind, caught.value.retryable) == ("reward-out-of-range", False)


@pytest.mark.parametrize("reward", [2, 2.0, np.float32(2), np.int64(2)])
def test_a_number_of_any_kind_is_a_reward(reward: Any) -> None:
    value = environment_adapter.read_step(_step(reward=reward)).rewards["agent"]
    assert (type(value), value) == (float, 2.0)


@pytest.mark.parametrize(
    ("part", "kind"), [(math.nan, "reward-not-finite"), (None, "reward-not-a-number"), (True, "reward-not-a-number")]
)
def test_reward_parts_must_be_finite_numbers_too(part: Any, kind: str) -> None:
    with pytest.raises(EnvironmentFailure, match="format") as caught:
        environment_adapter.read_step(_step(info={"reward_parts": {"format": part}}))
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (("obs", 1.0, True, {}), "step-shape"),
        (None, "step-shape"),
        (["obs", 1.0, True, False, {}], "step-shape"),
        (_step(observation=b"bytes"), "observation-type"),
        (_step(observation=["text"]), "observation-type"),
        (_step(observation=[ContentPart(type="image", asset="x")]), "observation-image"),
        (_step(observation=[Image(data=b"x", media_type="text/html")]), "observation-image"),
        (_step(observation=[Image(data=np.zeros((2, 2)))]), "observation-image"),  # type: ignore[arg-type]
        (_step(info={"tool_calls": [ToolCall(name="f", result=3)]}), "tool-call-type"),  # type: ignore[arg-type]
        (_step(info={"tool_calls": [ToolCall(name="f", duration_s=math.nan)]}), "tool-call-type"),
        (_step(terminated=1), "flag-not-a-bool"),
        (_step(truncated=None), "flag-not-a-bool"),
        (_step(info=None), "info-type"),
        (_step(info={"tool_calls": ["call"]}), "tool-call-type"),
        (_step(info={"history": [{"role": "nobody", "content": "x"}]}), "history-type"),
    ],
)
def test_an_invalid_result_of_a_step_is_refused_with_its_kind(result: Any, kind: str) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        environment_adapter.read_step(result)
    assert caught.value.kind == kind


def test_text_that_is_not_unicode_is_stored_with_replacements_and_named() -> None:
    image = Image(data=b"x", media_type="image/png", text="a\ud800")
    observation = [image, ContentPart(type="text", text="\ud83d\ude00\udfff")]
    answer = environment_adapter.read_step(_step(observation=observation, info={"dropped": ["mine"]}))
    texts = [part.text for part in answer.observations[AGENT] if isinstance(part, ContentPart)]
    assert texts == ["a\ufffd", "😀\ufffd"]
    assert answer.info["dropped"] == ["mine", "observation (lone surrogates)"]
    assert environment_adapter.read_reset(("\ud800", {})).observations == {AGENT: "\ufffd"}


def test_infos_keep_their_json_able_part_and_name_the_rest() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    info = {
        "kept": [1, 2.5, "x", None, True, np.int64(3), (1, 2)],
        "array": np.zeros(2),
        "nan": math.nan,
        "wide": 2**70,
        "bad\ud800": 1,
        "deep": {"object": object(), "fine": 1},
        "list": [1, object()],
        7: "seven",
    }
    kept = json_part(info)
    assert kept == {
        "kept": [1, 2.5, "x", None, True, 3, [1, 2]],
        "deep": {"fine": 1},
        "list": [1, None],
        "dropped": [
            "array (ndarray)",
            "nan (float)",
            "wide (int)",
            "bad? (int)",
            "deep.object (object)",
            "list[1] (object)",
            "7 (str)",
        ],
    }
    assert len(json_part(loop)["dropped"]) == 1


def test_a_structure_that_contains_itself_many_times_ends_soon_and_is_named() -> None:
    tree: dict[str, Any] = {"leaf": 1}
    tree["a"] = tree["b"] = tree
    tree["list"] = [tree, 2]
    assert json_part({"tree": tree}) == {
        "tree": {"leaf": 1, "list": [None, 2]},
        "dropped": [
            "tree.a (dict that contains itself)",
            "tree.b (dict that contains itself)",
            "tree.list[0] (dict that contains itself)",
        ],
    }


def test_one_part_that_is_shared_over_and_over_is_copied_within_bounds() -> None:
    shared: Any = [1]
    for _ in range(30):
        shared = [shared, shared]
    kept = json_part({"shared": shared, "after": 1})
    assert len(msgspec.json.encode(kept)) < 20 * MAX_ITEMS
    assert any(f"the rest, over {MAX_ITEMS} items" in name for name in kept["dropped"])


def test_text_beyond_the_bound_and_nesting_below_it_are_named() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = {"d": deep}
    long = "x" * (MAX_TEXT // 2)
    kept = json_part({"one": long, "two": long, "three": long, "short": "s", "deep": deep})
    assert (kept["one"], kept["short"], "three" in kept) == (long, "s", False)
    assert [name.partition(" ")[2] for name in kept["dropped"]][-1] == "(dict below 32 levels)"


def test_omitted_parts_are_named_up_to_a_limit_and_counted_beyond_it() -> None:
    names = json_part({"objects": [object() for _ in range(500)]})["dropped"]
    assert (len(names), names[-1]) == (MAX_NAMED + 1, f"and {500 - MAX_NAMED} more")


@pytest.mark.parametrize(
    "changes",
    [
        {"observation": "x" * (environment_adapter.MAX_OBSERVATION + 1)},
        {"observation": [ContentPart(type="text", text="x")] * (environment_adapter.MAX_PARTS + 1)},
        {"observation": [ContentPart(type="text", text="x" * (environment_adapter.MAX_OBSERVATION // 2))] * 3},
        {"info": {"history": [{"role": "user", "content": "x" * (environment_adapter.MAX_OBSERVATION // 2)}] * 3}},
        {"info": {"tool_calls": [ToolCall(name="t", arguments={})] * (environment_adapter.MAX_PARTS + 1)}},
    ],
    ids=["text", "parts", "text of parts", "history", "tool calls"],
)
def test_an_observation_larger_than_any_context_is_refused_never_cut(changes: Any) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        environment_adapter.read_step(_step(**changes))
    assert (caught.value.kind, caught.value.retryable) == ("observation-too-large", False)


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), JSON_LIKE))
def test_the_copy_of_any_info_can_be_stored(info: dict[str, Any]) -> None:
    kept = json_part(info)
    msgspec.json.decode(msgspec.json.encode(kept))
    msgspec.msgpack.decode(msgspec.msgpack.encode(kept))


def test_a_copy_does_not_follow_the_environments_objects() -> None:
    inner = {"a": [1]}
    parts = [ContentPart(type="text", text="a")]
    call = ToolCall(name="t", arguments={"x": [1]})
    seen = environment_adapter.read_step(_step(observation=parts, info={"inner": inner, "tool_calls": [call]}))
    inner["a"].append(2)
    parts.append(ContentPart(type="text", text="b"))
    call.arguments["x"].append(2)
    assert seen.info == {"inner": {"a": [1]}}
    assert seen.observations["agent"] == [ContentPart(type="text", text="a")]
    assert seen.tool_calls["agent"] == [ToolCall(name="t", arguments={"x": [1]})]


def test_an_agent_that_the_environment_does_not_have_is_refused() -> None:
    with pytest.raises(EnvironmentFailure, match="eve") as caught:
        environment_adapter.read_step_by_agent(({}, {"eve": 1.0}, {}, {}, {}), ["ann", "bob"])
    assert caught.value.kind == "unknown-agent"
