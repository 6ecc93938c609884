"""Checks of the server itself: it is healthy, serves the model, and reports the version of its weights."""

from __future__ import annotations

from headrace.errors import EpisodeFailure
from headrace.wire import policy_server
from headrace_workers.policies.version_confirmation import read_version
from headrace_workers.policy_check.findings import CheckFailed, CheckSkipped
from headrace_workers.policy_check.target import CheckTarget


async def server(subject: CheckTarget) -> str:

    answer = await subject.server.get(policy_server.HEALTH)
    if answer.status >= 500:
        raise CheckFailed(
            f"{policy_server.HEALTH} answers {answer.summary}", "Wait until the server is ready, or look at its log."
        )
    return "answers"


async def model(subject: CheckTarget) -> str:

    answer = await subject.server.get(policy_server.MODELS)
    if answer.status != 200:
        raise CheckSkipped(f"{policy_server.MODELS} answers {answer.status}")
    names = [card.id for card in answer.read(policy_server.ModelList).data]
    if not names:
        raise CheckSkipped(f"{policy_server.MODELS} lists no model")
    if subject.server.model not in names:
        raise CheckFailed(
            f"the server has {', '.join(names)}, not {subject.server.model}",
            "Set policy.model in the run spec (here --model) to one of them, or serve with --served-model-name.",
        )
    return f"{subject.server.model} is served"


async def version(subject: CheckTarget) -> str:

    answer = await subject.server.get(policy_server.WEIGHT_INFO)
    if answer.status != 200:
        raise CheckFailed(
            f"{policy_server.WEIGHT_INFO} answers {answer.summary}",
            "For training the server must report the version of its weights (vLLM: VLLM_SERVER_DEV_MODE=1).",
        )
    try:
        weights = read_version(answer.read(policy_server.WeightInfo).weight_version)
    except EpisodeFailure as failure:
        raise CheckFailed(failure.detail, failure.hint) from failure
    return f"the weights are version {weights}"
