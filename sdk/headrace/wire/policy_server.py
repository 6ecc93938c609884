"""The HTTP protocol of policy servers: requests of workers and the service, and an engine's responses.

* The messages are vLLM's; each struct holds the fields used here, and readers ignore all others.
* Prompts and samples are token ids. Text is used only with servers that support nothing else.
* A request states every parameter that changes the distribution, because a server may have other defaults.
* A field that a response omits is None, never a default that could be mistaken for the engine's value.

Three routes sample, the best first: ``POST /inference/v1/generate`` states which weights sampled which tokens;
``POST /v1/completions`` takes and returns token ids; ``POST /v1/chat/completions`` takes messages, and returns token
ids if the server can. ``GET /weight_info`` names the weights, ``GET /v1/models`` the models, and ``GET /health``
succeeds while the server runs.

Weights in a folder are loaded with ``POST /collective_rpc``, which calls the worker extension in
``headrace.integrations.vllm``, while ``POST /pause`` holds requests back; ``POST /update_weight_version`` names the
weights before ``POST /resume``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, UnsetType

from headrace.trajectory import Version

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
WEIGHT_INFO = "/weight_info"
MODELS = "/v1/models"
HEALTH = "/health"
ABORT_REQUESTS = "/inference/v1/abort_requests"

GENERATE_PREFIX = "generate-tokens-"
"""Prefix that vLLM adds to the id of a request to ``GENERATE``."""
PAUSE = "/pause"
RESUME = "/resume"
IS_PAUSED = "/is_paused"
METRICS = "/metrics"
RPC = "/collective_rpc"
UPDATE_WEIGHT_VERSION = "/update_weight_version"

REQUEST_ID = "X-Request-Id"
"""Header with the id of a request, which is unique among the open requests of a server."""

INITIAL_VERSION = "default"
"""The weight version of a vLLM server before one was set. It is parsed as 0.0."""

CLAMPED_LOGPROB = -9999.0
"""vLLM's value for a logprob that is unknown or not finite, since JSON has no NaN."""

ABORTED = "abort"
"""The finish reason of a request that the server ended early, with the tokens sampled so far."""

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
"""Kinds of policy failures in which a working server gave an invalid response to this prompt. Unlike an unreachable
server, the task may cause them, for example with a context that is too long for the engine's arithmetic."""

DNS_PREFIX = "dns+http://"
"""Prefix of an address that is a DNS name of several servers: those at all IP addresses to which it resolves."""


def base_url(text: str) -> str:
    """The canonical form of a base address: scheme and host in lower case, without a slash at the end.

    A final ``/v1``, as in the base URL of an OpenAI client, is removed, since the routes begin with it.
    """
    text = text.rstrip("/").removesuffix("/v1").rstrip("/")
    scheme, mark, rest = text.partition("://")
    place, slash, path = rest.partition("/")
    user, at, host = place.rpartition("@")
    return f"{scheme.lower()}{mark}{user}{at}{host.lower()}{slash}{path}" if mark else text


def canonical_address(text: str) -> str:
    """The canonical form of a policy server's address, or of a DNS name of several. Raises ValueError."""
    parts = urlsplit(text)
    plain = not (parts.query or parts.fragment)
    if parts.scheme in ("http", "https") and parts.netloc and plain:
        return base_url(text)
    if text.startswith(DNS_PREFIX) and parts.hostname and parts.port and plain and parts.path in ("", "/"):
        return base_url(text)
    raise ValueError(
        f"{text[:200]!r} is not the address of a policy server: give its base address, as in http://127.0.0.1:8471, "
        f"or the DNS name and port of several servers, as in {DNS_PREFIX}vllm:8000"
    )


PauseMode = Literal["keep", "wait", "abort"]
"""The treatment of running requests in a pause. ``keep``: they continue on the new weights. ``wait``: they finish on
the old weights first. ``abort``: they end with the tokens sampled so far."""

CHECK = "headrace_check"
CHECK_ADAPTER = "headrace_check_adapter"
LOAD = "headrace_load"
"""Methods for ``RPC``; their arguments are a folder and, if known, the digest of its weights."""

_LOADING = " -> "


def weight_version_name(version: Version, run: str = "") -> str:
    """The weight version that a server reports for a run, such as ``math@0.12``.

    Two runs may share a server and both count from 0.0. Without a run, a version counts for every run.
    """
    return f"{run}@{version}" if run else str(version)


def loading_name(current: str, name: str) -> str:
    """The weight version that a server reports while ``name`` is loaded over ``held``."""
    return f"{name_before_load(current)}{_LOADING}{name}"


def name_before_load(text: str) -> str:
    """The weight version before a running or interrupted load; without a load, the text itself."""
    return text.split(_LOADING)[0]


def run_of_weight_version(text: str) -> str:
    """The run in a server's weight version; empty if it names none."""
    return text.rpartition("@")[0]


def parse_weight_version(text: str, run: str = "") -> Version | None:
    """The version in a server's weight version.

    None during a load, for text that is not a version, and for a version of another run than ``run``. Without ``run``
    the version of any run is returned.
    """
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
    """Body of requests to load or unload an adapter. ``lora_path``: the folder to load."""

    lora_name: str
    lora_path: str = ""


def adapter_server_name(run: str, adapter: str, version: Version | None = None) -> str:
    """The name of a run's adapter at the servers. ``version``: that of the trained adapter; None for a frozen one.

    Requests name it as their model, so that the name states the version of every token. A name is never reused for
    another version.
    """
    return f"{run}/{adapter}" + (f"@{version}" if version is not None else "")


# Sampling -----------------------------------------------------------------------------------------------------


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of every route. The defaults change nothing about the policy's own distribution.

    All are sent with every request: a server may have other defaults, such as those in a model's
    ``generation_config.json``. ``top_k`` -1: all tokens. ``structured_outputs``: the format of the output, in vLLM's
    form: one of ``json``, ``regex``, ``choice``, ``grammar``.
    """

    max_tokens: int
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[str, float] = {}
    bad_words: Sequence[str] = ()
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    watermarking: bool = False
    structured_outputs: dict[str, Any] | UnsetType = UNSET


class TokenSampling(SamplingParameters, frozen=True, kw_only=True):
    """Sampling parameters of the routes that take token ids.

    ``logprobs`` 0: only those of the sampled tokens. ``prompt_logprobs`` 0: only those of the prompt tokens.
    """

    logprobs: int | UnsetType = UNSET
    prompt_logprobs: int | UnsetType = UNSET


class ImagePart(msgspec.Struct, frozen=True, kw_only=True):
    """An image for a placeholder token of the prompt, as a ``data:`` URL."""

    url: str
    type: Literal["image_url"] = "image_url"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of ``POST /inference/v1/generate``. ``token_ids`` int[n] is the prompt.

    Requests with different ``cache_salt`` do not share cached prefixes. ``content_parts``: images in the order of their
    placeholder tokens, one token each; the server expands it to the number of tokens of the image.
    """

    model: str
    token_ids: Sequence[int]
    sampling_params: TokenSampling
    content_parts: Sequence[ImagePart] = ()
    return_token_ids: bool = False
    cache_salt: str | None = None


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``POST /inference/v1/abort_requests``: vLLM's ids, see ``GENERATE_PREFIX``."""

    request_ids: list[str]


class CompletionRequest(TokenSampling, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions``. ``prompt`` int[n] are token ids."""

    model: str
    prompt: Sequence[int]
    return_token_ids: bool = False
    cache_salt: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a chat. ``content`` is text, or parts in OpenAI's form."""

    role: str
    content: str | list[dict[str, Any]]


class ChatRequest(SamplingParameters, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``.

    ``logprobs`` true: those of each sampled token. ``response_format``: the format of the output, in OpenAI's form.
    ``tools`` are shown to the model; with ``tool_choice`` ``none`` the server leaves its calls in the text.
    """

    model: str
    messages: Sequence[ChatMessage]
    logprobs: bool = False
    return_token_ids: bool = False
    response_format: dict[str, Any] | UnsetType = UNSET
    tools: Sequence[Mapping[str, Any]] | UnsetType = UNSET
    tool_choice: str | UnsetType = UNSET


# Responses ----------------------------------------------------------------------------------------------------


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """The sampled tokens ``[start, end)`` come from the weights named ``version``."""

    version: str | int
    start: int
    end: int


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The logprob of one sampled token. A chat server names the token by its text, and omits the id."""

    logprob: float | None = None
    token_id: int | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of the sampled tokens, one item each."""

    content: list[TokenLogprob] | None = None


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The logprob of a prompt token, given the tokens before it."""

    logprob: float | None = None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""An item for each token of a prompt, by token id. The first token has no logprob, and its item is None."""


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
    """Response to a ``GenerateRequest``. ``prompt_token_ids`` include all placeholder tokens of each image;
    ``mm_placeholders`` states their positions, by kind (``image``)."""

    choices: list[GenerateChoice] = []
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, list[PlaceholderRange]] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """``token_logprobs`` float[n], one for each sampled token."""

    token_logprobs: list[float | None] | None = None


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A completion. ``weight_versions`` is an addition of other servers; vLLM does not send it here."""

    text: str = ""
    token_ids: list[int] | None = None
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    weight_versions: list[VersionSpan] | None = None


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Response to a ``CompletionRequest``."""

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
    """Response to a ``ChatRequest``."""

    choices: list[ChatChoice] = []
    prompt_token_ids: list[int] | None = None


# The server ---------------------------------------------------------------------------------------------------


class WeightInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Response to ``GET /weight_info``: the version of the weights as ``lineage.n``, or ``INITIAL_VERSION``."""

    weight_version: str | int | float | None = None


class PauseInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Response to ``GET /is_paused``. ``is_paused``: the engine holds requests back."""

    is_paused: bool = False


class RpcRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``POST /collective_rpc``, which calls a method in every process of the engine."""

    method: str
    args: list[str]


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of ``CHECK``, ``CHECK_ADAPTER`` or ``LOAD`` in one process of the engine.

    ``refused``: why nothing was changed; ``kind``: the code of its InvalidWeights error, if known. ``mixed``: why the
    weights are neither the old nor the new ones. ``pending``: the files are being hashed; ask again. Without any of
    them the call succeeded.
    """

    tensors: int = 0
    bytes: int = 0
    refused: str = ""
    kind: str = ""
    mixed: str = ""
    pending: bool = False


class RpcResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The results of the engine's processes, one each."""

    results: list[LoadResult]


class VersionUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``POST /update_weight_version``: the weight version to report from now on."""

    new_version: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a server serves. ``max_model_len``: most tokens of prompt and output together. ``parent``: the base
    of an adapter; ``root``: the folder from which it was loaded."""

    id: str
    root: str | None = None
    max_model_len: int | None = None
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Response to ``GET /v1/models``."""

    data: list[ModelCard] = []


class EngineError(msgspec.Struct, frozen=True, kw_only=True):
    """The error in an ``ErrorResponse``. ``param`` names the invalid field."""

    message: str = ""
    type: str = ""
    param: str | None = None
    code: int | str | None = None


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a response with an error status."""

    error: EngineError
