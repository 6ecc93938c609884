"""How the tiny policy misbehaves when a test asks it to: slow, failing, stalling, lying.

* Each mode does what its name says and nothing else; left alone the server is honest.
* New settings replace the old ones whole and start their counts afresh.
* A lie sits at position 4, or at the last position of a shorter answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from headrace.errors import InvalidRequest
from headrace.trajectory import Version
from headrace.wire.policy_server import CLAMPED_LOGPROB
from headrace_workers.renderers.bytes_renderer import ASSISTANT, VOCAB_SIZE

LIE_POSITION = 4
"""Where a lie about one token sits."""

TOO_MANY = 10_000
"""Tokens of an answer that is longer than anybody asked for."""

Answer = dict[str, Any]
"""One choice of a completion, as JSON-able data."""


class Misbehaviour(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of the double, the body of ``POST /misbehave``. Requests for tokens are counted from 1, as far as they
    can be read."""

    slow_s: float = 0.0
    """Wait so long before each answer, in seconds."""
    fail_next: int = 0
    """Refuse so many requests with ``fail_status``, from now on."""
    fail_every: int = 0
    """Refuse each so-manieth request. 0: none."""
    fail_status: int = 500
    """Status of a refusal."""
    stall_next: int = 0
    """Hold so many requests for ``stall_s``, from now on, and then answer them."""
    stall_every: int = 0
    """Hold each so-manieth request. 0: none."""
    stall_s: float = 5.0
    """How long a stall lasts, in seconds."""
    keep_generating: bool = False
    """Go on with a request whose client has gone, as an engine that notices nothing."""
    load: Literal["", "fail", "mixed", "late", "die"] = ""
    """How a load of weights goes wrong: half of it is done and it answers 500, or says so; it is done, but takes
    ``load_s``; the process ends."""
    load_times: int = -1
    """How many loads. -1: no end."""
    load_s: float = 5.0
    """How long a late load takes, in seconds."""
    lie: str = ""
    """What to lie about: a key of ``LIES``. Empty: nothing."""
    lie_after: int = 0
    """Honest answers before the first lie."""
    lie_times: int = -1
    """How many lies. -1: no end."""
    reply: str | None = None
    """Say this, whatever is asked; each of its tokens has log-probability 0."""
    script: list[str] = []
    """Say the first of these at the first turn of a conversation, the second at the second; the last from then on."""

    def reply_to(self, prompt: Sequence[int]) -> str | None:
        """What it was told to say to a prompt, if anything."""
        if not self.script:
            return self.reply
        return self.script[min(prompt.count(ASSISTANT), len(self.script)) - 1]


class Fault(NamedTuple):
    """What happens to one request."""

    fail: bool
    wait_s: float
    lie: str


class Misbehaving:
    """Counts requests and says what happens to each."""

    def __init__(self, settings: Misbehaviour | None = None) -> None:
        self.set(settings or Misbehaviour())

    def set(self, settings: Misbehaviour) -> None:
        """Take new settings. Raises InvalidRequest for a lie that nobody knows."""
        if settings.lie and settings.lie not in LIES:
            raise InvalidRequest(f"No lie {settings.lie!r}.", hint=f"Known: {', '.join(LIES)}.")
        self.settings = settings
        self._asked = 0
        self._answered = 0
        self._loads = 0
        self._calm = settings == Misbehaviour()

    def next_fault(self) -> Fault:
        """What happens to the request that came now."""
        if self._calm:
            return _NO_FAULT
        settings = self.settings
        self._asked += 1
        fail = self._asked <= settings.fail_next or _each(settings.fail_every, self._asked)
        stall = self._asked <= settings.stall_next or _each(settings.stall_every, self._asked)
        return Fault(fail, settings.slow_s + (settings.stall_s if stall else 0.0), "" if fail else self._next_lie())

    def next_load(self) -> tuple[str, float]:
        """How the load that is asked for now goes wrong, and how long it takes besides."""
        self._loads += 1
        settings = self.settings
        if not settings.load or 0 <= settings.load_times < self._loads:
            return "", 0.0
        return ("", settings.load_s) if settings.load == "late" else (settings.load, 0.0)

    def _next_lie(self) -> str:
        self._answered += 1
        lies_before = self._answered - 1 - self.settings.lie_after
        told_enough = 0 <= self.settings.lie_times <= lies_before
        return "" if lies_before < 0 or told_enough else self.settings.lie


_NO_FAULT = Fault(False, 0.0, "")


def _each(every: int, number: int) -> bool:
    return every > 0 and number % every == 0


def _logprob(value: float | None) -> Callable[[Answer], None]:
    def lie(answer: Answer) -> None:
        logprobs = answer["logprobs"]["token_logprobs"]
        logprobs[min(LIE_POSITION, len(logprobs) - 1)] = value

    return lie


def _without(key: str) -> Callable[[Answer], None]:
    def lie(answer: Answer) -> None:
        answer[key] = None

    return lie


def _short_logprobs(answer: Answer) -> None:
    answer["logprobs"]["token_logprobs"].pop()


def _long_logprobs(answer: Answer) -> None:
    answer["logprobs"]["token_logprobs"].append(0.0)


def _too_many(answer: Answer) -> None:
    answer["token_ids"] = [0] * TOO_MANY
    answer["logprobs"]["token_logprobs"] = [-0.5] * TOO_MANY
    answer["weight_versions"][0]["end"] = TOO_MANY


def _negative_zeros(answer: Answer) -> None:
    logprobs = answer["logprobs"]["token_logprobs"]
    logprobs[:] = [-0.0 if value == 0 else value for value in logprobs]


def _bad_id(answer: Answer) -> None:
    ids = answer["token_ids"]
    ids[min(LIE_POSITION, len(ids) - 1)] = VOCAB_SIZE


def _wrong_version(answer: Answer) -> None:
    for span in answer["weight_versions"]:
        version = Version.parse(span["version"])
        span["version"] = str(Version(version.lineage, version.n + 1))


def _unreadable_version(answer: Answer) -> None:
    for span in answer["weight_versions"]:
        span["version"] = "latest"


def _other_prompt(answer: Answer) -> None:
    answer["prompt_token_ids"] = [0]


def _nothing(answer: Answer) -> None:
    answer["token_ids"] = []
    answer["logprobs"]["token_logprobs"] = []
    answer["weight_versions"] = []
    answer["text"] = ""


def _as_it_is(answer: Answer) -> None:
    """The server itself lets the ids run on past the stop string, or spoils the bytes of the answer."""


STOP_OVERRUNS = ("stop-overrun", "stop-overrun-short-logprobs")
"""Lies in which the text ends at the stop string and the ids do not."""

SPOILS: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda body: b"<html>proxy error</html>",
    "cut-short": lambda body: body[: len(body) // 2],
}
"""Lies about the whole answer: what becomes of its bytes."""

LIES: dict[str, Callable[[Answer], None]] = {
    **dict.fromkeys(SPOILS, _as_it_is),
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
    "stop-overrun": _as_it_is,
    "stop-overrun-short-logprobs": _short_logprobs,
}
"""Every lie by name. ``negative-zeros`` is true: forced tokens are reported as -0.0. ``wrong-version`` names the
version after the one that answered."""
