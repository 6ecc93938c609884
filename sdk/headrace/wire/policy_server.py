"""The protocol of policy servers: what workers and the service send to an engine, and what it answers.

* The shapes are vLLM's; each struct holds the fields that we use, and a reader ignores all others.
* Token ids go in and come out. Text is asked for only where a server knows nothing else.
* What an answer leaves out is None, never a default that could be taken for the engine's word.

Three routes sample, from the best to the least: ``POST /inference/v1/generate`` says which weights sampled which
tokens; ``POST /v1/completions`` takes and gives token ids; ``POST /v1/chat/completions`` takes messages and gives token
ids where the server can. ``GET /weight_info`` names the weights, ``GET /v1/models`` the models, ``GET /health`` says
that the server lives.

Weights of a folder are loaded with ``POST /collective_rpc``, by what ``headrace.integrations.vllm`` adds to vLLM's
workers, while ``POST /pause`` holds requests back; ``POST /update_weight_version`` names them before ``POST /resume``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from headrace.trajectory import Version

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
WEIGHT_INFO = "/weight_info"
MODELS = "/v1/models"
HEALTH = "/health"
ABORT_REQUESTS = "/inference/v1/abort_requests"

GENERATE_PREFIX = "generate-tokens-"
"""vLLM's own id of a request to ``GENERATE`` is this and the request's id."""
PAUSE = "/pause"
RESUME = "/resume"
IS_PAUSED = "/is_paused"
METRICS = "/metrics"
RPC = "/collective_rpc"
UPDATE_WEIGHT_VERSION = "/update_weight_version"

REQUEST_ID = "X-Request-Id"
"""Header: the id of a request. No two that are open at one server share theirs."""

INITIAL_VERSION = "default"
"""The weight version of a vLLM server before anybody named one. It reads as 0.0."""

CLAMPED_LOGPROB = -9999.0
"""What vLLM writes for a logprob that is no finite number, or that it does not know. JSON has no NaN."""

ABORTED = "abort"
"""The finish reason of a request that the server ended itself, with what was sampled until then."""

BAD_RESPONSE_KINDS = frozenset(
    {
        "empty-sample",
        "logprob-infinite",
        "logprob-missing",
        "logprob-nan",
        "logprob-of-another-token",
        "logprob-out-of-range",
        "logprob-positive",
        "logprob-unwritable",
        "logprobs-too-few",
        "logprobs-too-many",
        "token-out-of-range",
        "too-many-tokens",
    }
)
"""Kinds of policy failures in which a server that works answered this very prompt wrongly. Unlike an engine that is
away, they may be the task's doing, such as a context that is too long for the engine's arithmetic."""

DNS_PREFIX = "dns+http://"
"""What an address begins with that is a name: it stands for the servers at all IP addresses that it resolves to."""


def base_url(text: str) -> str:
    """The one spelling of a base address: scheme and host in lower case, no slash at the end, and without the ``/v1``
    of an OpenAI client's base URL, which routes begin with themselves."""
    text = text.rstrip("/").removesuffix("/v1").rstrip("/")
    scheme, mark, rest = text.partition("://")
    place, slash, path = rest.partition("/")
    user, at, host = place.rpartition("@")
    return f"{scheme.lower()}{mark}{user}{at}{host.lower()}{slash}{path}" if mark else text


def canonical_address(text: str) -> str:
    """An address of a policy server, or a name of several, as they are known by; raises ValueError for what is none."""
    parts = urlsplit(text)
    plain = not (parts.query or parts.fragment)
    if parts.scheme in ("http", "https") and parts.netloc and plain:
        return base_url(text)
    if text.startswith(DNS_PREFIX) and parts.hostname and parts.port and plain and parts.path in ("", "/"):
        return base_url(text)
    raise ValueError(
        f"{text!r} is no address of a policy server: give its base address, as in http://127.0.0.1:8471, or a name and "
        f"a port that stand for several, as in {DNS_PREFIX}vllm:8000"
    )


PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of requests when an engine is paused: they go on from where they are, on the new weights; the pause
waits until they are done, on the old ones; they are ended with what they have."""

CHECK = "headrace_check"
LOAD = "headrace_load"
"""Methods of ``RPC``; their one argument is a folder."""

_LOADING = " -> "


def weight_version_name(version: Version, run: str = "") -> str:
    """What a server calls the weights of a run, such as ``math@0.12``. Two runs may have the same server and count from
    0.0 both; without its run, a version is whosever asks."""
    return f"{run}@{version}" if run else str(version)


def loading_name(held: str, name: str) -> str:
    """What a server is made to call its weights while those called ``name`` are loaded over those called ``held``."""
    return f"{name_before_load(held)}{_LOADING}{name}"


def name_before_load(text: str) -> str:
    """What a server called its weights before the load that is under way, or that was broken off; else the text."""
    return text.split(_LOADING)[0]


def run_of_weight_version(text: str) -> str:
    """The run that a server's word for its weights names; empty if it names none."""
    return text.rpartition("@")[0]


def parse_weight_version(text: str, run: str = "") -> Version | None:
    """The version that a server's word for its weights stands for; None if it stands for none, as in a load, or for one
    of another run than ``run``. Without ``run`` it may be of any."""
    if text == INITIAL_VERSION:
        return Version(0, 0)
    named, _, version = text.rpartition("@")
    if _LOADING in text or (named and run and named != run):
        return None
    try:
        return Version.parse(version)
    except ValueError:
        return None


LOAD_ADAPTER = "/v1/load_lora_adapter"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"


class AdapterRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of the two routes above. ``lora_path``: of the folder that is loaded."""

    lora_name: str
    lora_path: str = ""


def adapter_server_name(run: str, adapter: str, version: Version | None = None) -> str:
    """What a run's adapter is called at the servers; ``version``: of the trained one. A request names it as its model,
    so that the version of every token is known by the name; a name is never used for two versions."""
    return f"{run}/{adapter}" + (f"@{version}" if version is not None else "")


# Sampling -----------------------------------------------------------------------------------------------------


class GenerateSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of a ``GenerateRequest`` are drawn.

    ``logprobs`` 0: of each sampled token and no other. ``prompt_logprobs`` 0: of each prompt token and no other.
    ``structured_outputs``: what the answer must match, as vLLM has it: one of ``json``, ``regex``, ``choice``,
    ``grammar``.
    """

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None


class ImagePart(msgspec.Struct, frozen=True, kw_only=True):
    """An image for a placeholder token of the prompt, as a ``data:`` URL."""

    url: str
    type: Literal["image_url"] = "image_url"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of ``POST /inference/v1/generate``. ``token_ids`` int[n] is the prompt. ``cache_salt``: requests with
    different ones share no cached prefixes. ``content_parts``: images in the order of their placeholder tokens, one
    token each; the server puts as many there as the image has."""

    model: str
    token_ids: Sequence[int]
    sampling_params: GenerateSampling
    content_parts: Sequence[ImagePart] = ()
    return_token_ids: bool = False
    cache_salt: str | None = None


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``POST /inference/v1/abort_requests``: ids as vLLM has them, see ``GENERATE_PREFIX``."""

    request_ids: list[str]


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of ``POST /v1/completions``. ``prompt`` int[n] are token ids; the rest is as in ``GenerateSampling``."""

    model: str
    prompt: Sequence[int]
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None
    return_token_ids: bool = False
    cache_salt: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a chat: ``content`` is text, or parts as OpenAI has them."""

    role: str
    content: str | list[dict[str, Any]]


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of ``POST /v1/chat/completions``. ``logprobs`` true: of each sampled token. ``response_format``: what the
    answer must match, as OpenAI has it. ``tools`` are shown to the model; with ``tool_choice`` ``none`` the server does
    not take its calls out of the text."""

    model: str
    messages: Sequence[ChatMessage]
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logprobs: bool = False
    return_token_ids: bool = False
    response_format: dict[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | None = None
    structured_outputs: dict[str, Any] | None = None


# Answers ------------------------------------------------------------------------------------------------------


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """The sampled tokens ``[start, end)`` are of the weights named ``version``."""

    version: str | int
    start: int
    end: int


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sampled token. A chat server names it by its text, and leaves out the id."""

    logprob: float | None = None
    token_id: int | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """One item for each sampled token."""

    content: list[TokenLogprob] | None = None


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The logprob of a token of the prompt, given those before it."""

    logprob: float | None = None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""One item for each token of a prompt, by token id; the first one has no logprob and is None."""


class GenerateChoice(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: list[int] | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None


class PlaceholderRange(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens ``[offset, offset + length)`` of a prompt stand for one image."""

    offset: int
    length: int


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a ``GenerateRequest``. ``prompt_token_ids`` have all placeholder tokens of each image;
    ``mm_placeholders`` says where they are, by kind (``image``)."""

    choices: list[GenerateChoice] = []
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, list[PlaceholderRange]] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """``token_logprobs`` float[n], one for each sampled token."""

    token_logprobs: list[float | None] | None = None


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """``weight_versions`` is no field of vLLM's here; a server may give it all the same."""

    text: str = ""
    token_ids: list[int] | None = None
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    weight_versions: list[VersionSpan] | None = None


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a ``CompletionRequest``."""

    choices: list[CompletionChoice] = []


class ChatText(msgspec.Struct, frozen=True, kw_only=True):
    content: str | None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    message: ChatText = ChatText()
    token_ids: list[int] | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None


class ChatResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a ``ChatRequest``."""

    choices: list[ChatChoice] = []
    prompt_token_ids: list[int] | None = None


# The server ---------------------------------------------------------------------------------------------------


class WeightInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Response to ``GET /weight_info``: the version of the weights as ``lineage.n``, or ``INITIAL_VERSION``."""

    weight_version: str | int | float | None = None


class PauseInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``GET /is_paused``: whether the engine holds requests back."""

    is_paused: bool = False


class RpcRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``POST /collective_rpc``: run a method in every process of the engine."""

    method: str
    args: list[str]


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of the engine answers to ``CHECK`` or ``LOAD``. ``refused``: why nothing was changed. ``mixed``:
    why its weights are neither the old nor the new ones. Neither: all is well."""

    tensors: int = 0
    bytes: int = 0
    refused: str = ""
    mixed: str = ""


class RpcResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One result for each process of the engine."""

    results: list[LoadResult]


class VersionUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``POST /update_weight_version``: what the weights are called from now on."""

    new_version: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a server answers for. ``max_model_len``: most tokens of prompt and answer. ``parent``: the base of
    an adapter; ``root``: the folder that it was loaded from."""

    id: str
    root: str | None = None
    max_model_len: int | None = None
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``GET /v1/models``."""

    data: list[ModelCard] = []


class EngineError(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the body of an error: ``param`` names the field that was wrong."""

    message: str = ""
    type: str = ""
    param: str | None = None
    code: int | str | None = None


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Body of an answer with an error status."""

    error: EngineError
