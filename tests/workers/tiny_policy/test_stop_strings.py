"""G11: a stop string ends the text and not the token ids. What is stored is what was sampled, whole; the environment
gets the text up to the stop; the next prompt extends the stored ids. Played against the double, over HTTP."""

import time
from typing import Any

import pytest

from headrace.trajectory import Trajectory
from headrace.validation import validate
from headrace_workers.episode import EpisodeRun
from headrace_workers.policies import ServedPolicies
from headrace_workers.renderers.bytes_renderer import ASSISTANT, END, USER
from tests.workers.fakes import Turns, assignment, failure_of, plan, tools

BRIDGE = [USER, *b"obs 1", END, ASSISTANT]

VARIANTS = {
    "a: the text without the stop string, the ids with it": ("7</a>", "", 64, b"7</a>", "7</a>"),
    "b: the ids run on": ("7</a>\n\nX", "stop-overrun", 64, b"7</a>\n\nX", "7</a>\n\nX"),
    "d: cut off inside the stop string": ("7</a>", "", 4, b"7</a", ""),
    "e: a stop token that is not in the text": ("7", "", 64, b"7", ""),
}


async def play(api: Any, actions: list[str], *, max_tokens: int = 64) -> Trajectory:
    """Two turns of an episode, each with the double's answer."""

    class Hears(Turns):
        def step(self, action: str) -> Any:
            actions.append(action)
            return super().step(action)

    its_tools = tools(None, lambda: Hears(last=2))
    its_tools.policies = ServedPolicies(default_endpoints=[api.address], clock=time.monotonic)
    spec = plan(sampling={"stop": ["</a>"], "max_tokens": max_tokens})
    try:
        record = await EpisodeRun(its_tools, assignment(), spec).run()
    finally:
        await its_tools.policies.close()
        its_tools.threads.close()
    validate(record)
    return record


@pytest.mark.parametrize("variant", VARIANTS)
async def test_g11_all_sampled_ids_are_stored_and_the_environment_gets_the_text_up_to_the_stop(api, variant):
    reply, lie, max_tokens, stored, said = VARIANTS[variant]
    await api.misbehave(reply=reply, lie=lie)
    actions: list[str] = []
    record = await play(api, actions, max_tokens=max_tokens)
    (segment,) = record.segments
    first, second = segment.turns
    ids = segment.token_ids.tolist()
    text = ids[first.start : first.end]
    assert bytes(text[:-1] if text[-1] == END else text) == stored
    assert first.end - first.start == len(text) == segment.sampled[first.start : first.end].sum()
    assert (segment.logprobs[first.start : first.end] <= 0).all()
    assert actions == ["7</a" if variant.startswith("d") else "7"] * 2
    assert [turn.said for turn in segment.turns] == [said] * 2
    assert [m.content for m in record.messages if m.role == "assistant"] == actions
    bridge = BRIDGE if text[-1] == END else [END, *BRIDGE]
    assert ids[first.end : second.start] == bridge  # nothing between the stored ids and the next turn is left out


async def test_g11_ids_without_a_logprob_each_are_a_policy_failure(api):
    await api.misbehave(reply="7</a>\n\nX", lie="stop-overrun-short-logprobs")
    record = await play(api, [])
    assert failure_of(record) == ("policy", "logprobs-too-few", True)
    assert record.segments == []
