"""Renderers and the real vLLM: they agree, and what a stop string does to a turn."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_model import write_model
from headrace.runspec import PolicySpec
from headrace.trajectory import Message, Sampling
from headrace_workers.episode import EpisodeRun, turn_seed
from headrace_workers.policies import SampleRequest, ServedPolicies
from headrace_workers.policy_check.cli import check_server
from headrace_workers.renderers import make_renderer
from tests.vllm.server import Vllm
from tests.workers.fakes import Turns, assignment, plan, tools

pytestmark = [pytest.mark.component("vllm"), pytest.mark.timeout(900)]

TOKENS = 400


async def statuses(vllm: Vllm, tokenizer: Path, renderer: str) -> dict[str, str]:
    asked = {"renderer": renderer, "tokenizer": str(tokenizer)}
    findings = await check_server(vllm.address, asked, tolerance=0.01, timeout_s=120.0)
    return {finding.check: finding.status for finding in findings}


@pytest.mark.parametrize("renderer", ["template", "qwen3"])
async def test_every_check_of_a_policy_server_passes(vllm: Vllm, renderer: str):
    found = await statuses(vllm, vllm.model, renderer)
    del found["stop string"], found["image"]  # the model may say nothing that has letters, and reads text only
    assert found == dict.fromkeys(found, "PASS")


async def test_a_template_that_the_engine_does_not_use_is_detected(vllm: Vllm, tmp_path: Path):
    write_model(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text() + "<think>\n")
    found = await statuses(vllm, tmp_path, "template")
    assert [name for name, status in found.items() if status == "FAIL"] == ["template"]


async def test_g11_a_stop_string_inside_a_token_cuts_the_text_and_not_the_ids(vllm: Vllm):
    policy = {"renderer": "template", "tokenizer": str(vllm.model)}
    renderer = make_renderer(PolicySpec(**policy))
    policies = ServedPolicies(default_endpoints=[vllm.address], clock=time.monotonic)
    actions: list[str] = []

    class Hears(Turns):
        def step(self, action: str) -> Any:
            actions.append(action)
            return super().step(action)

    its_tools = tools(None, lambda: Hears(last=2))
    its_tools.policies = policies
    try:
        for seed in range(20):
            free = await policies.at([]).sample(
                SampleRequest(
                    id=f"free-{seed}",
                    group="g",
                    episode="e",
                    model="policy",
                    prompt=renderer.start([Message(role="user", content="obs 0")]).new_ids,
                    sampling=Sampling(seed=turn_seed(seed, 0)),
                    max_tokens=TOKENS,
                    stop=(),
                    stop_token_ids=renderer.stop_token_ids,
                    timeout_s=120.0,
                    vocab_size=renderer.tokenizer.vocab_size,
                )
            )
            if (found := inside_a_token(renderer, list(free.token_ids))) is not None:
                break
        assert found is not None
        end, stop = found
        spec = plan(policy=policy, sampling={"stop": [stop], "max_tokens": TOKENS})
        record = await EpisodeRun(its_tools, assignment(sampling_seed=seed), spec).run()
    finally:
        await policies.close()
        its_tools.threads.close()
    segment = record.segments[0]
    first, second = segment.turns
    ids = segment.token_ids.tolist()
    assert ids[first.start : first.end] == list(free.token_ids[:end])
    assert first.said.endswith(renderer.parse([ids[first.end - 1]]))
    assert not first.said.endswith(stop)  # the token goes on after the stop string
    assert actions[0] == first.said.partition(stop)[0]
    assert renderer.parse(ids[first.end : second.start]).startswith("<|im_end|>\n<|im_start|>user\nobs 1")


def inside_a_token(renderer: Any, ids: list[int]) -> tuple[int, str] | None:
    """The end of a token of an answer, and the two letters before its last one, which do not occur earlier."""
    for end in range(1, len(ids)):
        token, before = renderer.parse([ids[end - 1]]), renderer.parse(ids[: end - 1])
        if token.isascii() and token.strip().isalpha():  # special tokens are no text to the engine
            for stop in (token[at : at + 2] for at in range(len(token) - 2)):
                if (before + token).find(stop) >= len(before):
                    return end, stop
    return None
