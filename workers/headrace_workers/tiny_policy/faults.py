"""Faults of the tiny policy that tests can request: slow, failing, stalling or false answers.

* Each setting causes only the fault that it names; without settings the answers are correct.
* New settings replace all old ones and restart their counts.
* A false token is at position 4, or at the last position of a shorter answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from headrace.errors import InvalidRequest
from headrace.trajectory import Version
from headrace.wire.policy_server import CLAMPED_LOGPROB
from headrace_workers.renderers.bytes_renderer import ASSISTANT, END, VOCAB_SIZE
from headrace_workers.tiny_policy.messages import AnswerData
from headrace_workers.tiny_policy.sampler import Generation, SamplerSettings, end_generation

LIE_POSITION = 4
"""Position of a falsified token."""

TOO_MANY = 10_000
"""Tokens of an answer that exceeds the requested length."""


class FaultSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fault settings, the body of ``POST /misbehave``. Readable requests for tokens are counted from 1."""

    slow_s: float = 0.0
    """Delay before each answer, in seconds."""
    fail_next: int = 0
    """Number of requests to refuse with ``fail_status``, from now on."""
    fail_every: int = 0
    """Refuse every Nth request. 0: none."""
    fail_status: int = 500
    """Status of a refusal."""
    stall_next: int = 0
    """Number of requests to stall for ``stall_s``, from now on, before they are answered."""
    stall_every: int = 0
    """Stall every Nth request. 0: none."""
    stall_s: float = 5.0
    """Length of a stall, in seconds."""
    keep_generating: bool = False
    """Continue a request whose client has disconnected, like an engine that does not notice."""
    load: Literal["", "fail", "mixed", "late", "die"] = ""
    """The fault of a weight load: half of it is applied and it answers 500 or success; it takes ``load_s``; or the
    process ends."""
    load_times: int = -1
    """Number of loads with the fault. -1: all."""
    load_s: float = 5.0
    """Length of a late load, in seconds."""
    lie: str = ""
    """Part of the answer to falsify: a key of ``LIES``. Empty: nothing."""
    lie_after: int = 0
    """Number of correct answers before the first lie."""
    lie_times: int = -1
    """Number of lies. -1: unlimited."""
    reply: str | None = None
    """Fixed answer to every prompt; each of its tokens has log-probability 0."""
    script: list[str] = []
    """Answers by turn of a conversation; the last one repeats."""

    def reply_to(self, prompt: Sequence[int]) -> str | None:
        """The configured answer to a prompt, if any."""
        if not self.script:
            return self.reply
        return self.script[min(prompt.count(ASSISTANT), len(self.script)) - 1]


class RequestFault(NamedTuple):
    """The faults of one request."""

    fail: bool
    wait_s: float
    lie: str


class FaultInjector:
    """Counts requests and decides the faults of each."""

    def __init__(self, settings: FaultSettings | None = None) -> None:
        self.set(settings or FaultSettings())

    def set(self, settings: FaultSettings) -> None:
        """Apply new settings. Raises InvalidRequest for an unknown lie."""
        if settings.lie and settings.lie not in LIES:
            raise InvalidRequest(f"Unknown lie {settings.lie!r}.", hint=f"The known lies are {', '.join(LIES)}.")
        self.settings = settings
        self._requests = 0
        self._answers = 0
        self._loads = 0
        self._is_honest = settings == FaultSettings()

    def next_fault(self) -> RequestFault:
        """The faults of the current request."""
        if self._is_honest:
            return _NO_FAULT
        settings = self.settings
        self._requests += 1
        fail = self._requests <= settings.fail_next or _each(settings.fail_every, self._requests)
        stall = self._requests <= settings.stall_next or _each(settings.stall_every, self._requests)
        return RequestFault(
            fail, settings.slow_s + (settings.stall_s if stall else 0.0), "" if fail else self._next_lie()
        )

    def next_load(self) -> tuple[str, float]:
        """The fault of the current load, and its extra time in seconds."""
        self._loads += 1
        settings = self.settings
        if not settings.load or 0 <= settings.load_times < self._loads:
            return "", 0.0
        return ("", settings.load_s) if settings.load == "late" else (settings.load, 0.0)

    def _next_lie(self) -> str:
        self._answers += 1
        lies_before = self._answers - 1 - self.settings.lie_after
        is_over = 0 <= self.settings.lie_times <= lies_before
        return "" if lies_before < 0 or is_over else self.settings.lie


_NO_FAULT = RequestFault(False, 0.0, "")


def _each(every: int, number: int) -> bool:
    return every > 0 and number % every == 0


def _logprob(value: float | None) -> Callable[[AnswerData], None]:
    def lie(answer: AnswerData) -> None:
        logprobs = answer["logprobs"]["token_logprobs"]
        logprobs[min(LIE_POSITION, len(logprobs) - 1)] = value

    return lie


def _without(key: str) -> Callable[[AnswerData], None]:
    def lie(answer: AnswerData) -> None:
        answer[key] = None

    return lie


def _short_logprobs(answer: AnswerData) -> None:
    answer["logprobs"]["token_logprobs"].pop()


def _long_logprobs(answer: AnswerData) -> None:
    answer["logprobs"]["token_logprobs"].append(0.0)


def _too_many(answer: AnswerData) -> None:
    answer["token_ids"] = [0] * TOO_MANY
    answer["logprobs"]["token_logprobs"] = [-0.5] * TOO_MANY
    answer["weight_versions"][0]["end"] = TOO_MANY


def _negative_zeros(answer: AnswerData) -> None:
    logprobs = answer["logprobs"]["token_logprobs"]
    logprobs[:] = [-0.0 if value == 0 else value for value in logprobs]


def _bad_id(answer: AnswerData) -> None:
    ids = answer["token_ids"]
    ids[min(LIE_POSITION, len(ids) - 1)] = VOCAB_SIZE


def _wrong_version(answer: AnswerData) -> None:
    for span in answer["weight_versions"]:
        version = Version.parse(span["version"])
        span["version"] = str(Version(version.lineage, version.n + 1))


def _unreadable_version(answer: AnswerData) -> None:
    for span in answer["weight_versions"]:
        span["version"] = "latest"


def _other_prompt(answer: AnswerData) -> None:
    answer["prompt_token_ids"] = [0]


def _nothing(answer: AnswerData) -> None:
    answer["token_ids"] = []
    answer["logprobs"]["token_logprobs"] = []
    answer["weight_versions"] = []
    answer["text"] = ""


def _unchanged(answer: AnswerData) -> None:
    """Leave the answer unchanged: the server itself adds ids after the stop string or corrupts the bytes."""


STOP_OVERRUNS = ("stop-overrun", "stop-overrun-short-logprobs")
"""Lies whose text ends at the stop string while the ids continue."""

SPOILS: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda body: b"<html>proxy error</html>",
    "cut-short": lambda body: body[: len(body) // 2],
}
"""Lies that corrupt the bytes of the whole answer."""

LIES: dict[str, Callable[[AnswerData], None]] = {
    **dict.fromkeys(SPOILS, _unchanged),
    "too-many-tokens": _too_many,
    "no-token-ids": _without("token_ids"),
    "no-logprobs": _without("logprobs"),
    "no-versions": _without("weight_versions"),
    "nan-logprob": _logprob(math.nan),
    "null-logprob": _logprob(None),
    "made-up-logprob": _logprob(CLAMPED_LOGPROB),
    "infinite-logprob": _logprob(-math.inf),
    "positive-logprob": _logprob(0.3),
    "huge-logprob": _logprob(-1e308),
    "negative-zeros": _negative_zeros,
    "short-logprobs": _short_logprobs,
    "long-logprobs": _long_logprobs,
    "bad-id": _bad_id,
    "no-tokens": _nothing,
    "wrong-version": _wrong_version,
    "unreadable-version": _unreadable_version,
    "other-prompt": _other_prompt,
    "stop-overrun": _unchanged,
    "stop-overrun-short-logprobs": _short_logprobs,
}
"""Every lie by name. ``negative-zeros`` is not false: it reports forced tokens as -0.0. ``wrong-version`` names the
version after the one that answered."""


def overrun(generation: Generation, sampling: SamplerSettings) -> Generation:
    """Return the text up to the stop string, but the ids of all sampled tokens without the end-of-turn token."""
    stopped = end_generation(generation.token_ids, generation.logprobs, sampling)
    ids = [token for token in generation.token_ids if token != END]
    return stopped._replace(token_ids=ids, logprobs=generation.logprobs[: len(ids)])


def falsify(lie: str, answer: dict[str, Any], prompt: list[int]) -> None:
    """Falsify each choice of an answer."""
    for choice in answer["choices"]:
        if choice["prompt_token_ids"] is not None:
            choice["prompt_token_ids"] = prompt
        if choice["logprobs"] is not None:
            choice["logprobs"]["token_logprobs"] = list(choice["logprobs"]["token_logprobs"])
        LIES[lie](choice)
