"""A simulated engine with a KV cache and a queue, and a run that plays episodes on several engines."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace_orchestrator.policy_servers import admission
from headrace_orchestrator.policy_servers.admission import Admission, Load, ServerPoll

TICKS_PER_POLL = 10


@dataclass
class Request:
    prompt: int
    output_tokens: int
    tokens: float = 0.0

    @property
    def kv_tokens_used(self) -> float:
        return self.prompt + self.tokens


@dataclass
class Engine:
    """An engine that gives every running request a token a tick, up to ``speed`` in all. It starts a queued request if
    the KV cache has room for the prompt. When the cache is full it preempts the newest request, which
    starts over later.
    ``zero_share``: share of readings whose gauges are zero."""

    kv_tokens: int
    max_running: int = 256
    speed: float = 1e9
    zero_share: float = 0.0
    up: bool = True
    paused: bool = False
    running: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    completed: int = 0
    preemptions: int = 0
    tokens: float = 0.0

    def tick(self) -> list[Request]:
        """Advance by one tick; returns the finished requests."""
        if self.paused:
            return []
        kv_tokens_used = sum(request.kv_tokens_used for request in self.running)
        while (
            self.waiting
            and len(self.running) < self.max_running
            and kv_tokens_used + self.waiting[0].prompt < self.kv_tokens
        ):
            request = self.waiting.popleft()
            kv_tokens_used += request.prompt
            self.running.append(request)
        share = min(1.0, self.speed / max(1, len(self.running)))
        for request in self.running:
            request.tokens += share
        self.tokens += share * len(self.running)
        kv_tokens_used += share * len(self.running)
        while kv_tokens_used > self.kv_tokens and len(self.running) > 1:
            request = self.running.pop()
            kv_tokens_used -= request.kv_tokens_used
            request.tokens = 0.0
            self.waiting.appendleft(request)
            self.preemptions += 1
        finished = [request for request in self.running if request.tokens >= request.output_tokens]
        self.running = [request for request in self.running if request.tokens < request.output_tokens]
        self.completed += len(finished)
        return finished

    def die(self) -> list[Request]:
        lost = [*self.running, *self.waiting]
        self.running, self.waiting = [], deque()
        self.completed, self.preemptions, self.tokens, self.up = 0, 0, 0.0, False
        return lost

    @property
    def used(self) -> float:
        """Share in use of its scarcest resource: KV cache, sequences or speed."""
        kv_tokens_used = sum(request.kv_tokens_used for request in self.running)
        return min(
            1.0,
            max(kv_tokens_used / self.kv_tokens, len(self.running) / self.max_running, len(self.running) / self.speed),
        )

    def read(self, chance: random.Random) -> Load:
        if chance.random() < self.zero_share:
            return Load(0, 0, 0, self.completed, self.preemptions, self.tokens)
        used = sum(request.kv_tokens_used for request in self.running) / self.kv_tokens
        return Load(len(self.running), len(self.waiting), min(1.0, used), self.completed, self.preemptions, self.tokens)


@dataclass
class World:
    """A run of endless episodes of ``turns`` turns; the environment takes ``env_ticks`` ticks between two turns.
    ``fixed``: a constant number of concurrent episodes in place of the controller's limit."""

    engines: list[Engine]
    turns: int = 4
    prompt: int = 40
    output_tokens: int = 60
    env_ticks: int = 20
    slots: int = 100_000
    fixed: int | None = None
    seed: int = 0
    state: Admission = field(default_factory=Admission)
    leased: int = 0
    ended: int = 0
    useful: float = 0.0
    used: float = 0.0
    history: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.requests: dict[int, tuple[Request, int]] = {}
        self.thinking: deque[tuple[int, int]] = deque()
        self.ticks = 0
        self.state = admission.poll(
            self.state, {str(number): ServerPoll("serving") for number in range(len(self.engines))}, 0
        )

    @property
    def limit(self) -> int:
        if self.fixed is not None:
            return self.fixed
        attainable = self.state.attainable
        return self.slots if attainable is None else min(attainable, self.slots)

    def polls(self, count: int) -> list[int]:
        """Advance by this number of polls; returns the limit at each."""
        start = len(self.history)
        for _ in range(count):
            for _ in range(TICKS_PER_POLL):
                self._tick()
            polls = {str(number): self._poll(engine) for number, engine in enumerate(self.engines)}
            self.state = admission.poll(self.state, polls, self.leased)
            self.used += sum(engine.used for engine in self.engines) / len(self.engines)
            self.history.append(self.state.attainable or 0)
        return self.history[start:]

    def _poll(self, engine: Engine) -> ServerPoll:
        if not engine.up:
            return ServerPoll("absent")
        return ServerPoll("paused" if engine.paused else "serving", engine.read(self.chance))

    def _tick(self) -> None:
        self.ticks += 1
        while self.leased < self.limit:
            self.leased += 1
            self._request(self.turns)
        while self.thinking and self.thinking[0][0] <= self.ticks:
            self._request(self.thinking.popleft()[1])
        for engine in self.engines:
            self._finish(engine.tick() if engine.up else [])

    def _request(self, turns_left: int) -> None:
        up = [engine for engine in self.engines if engine.up]
        if not up:  # no server is up: try again later
            self.thinking.append((self.ticks + 10, turns_left))
            return
        engine = min(up, key=lambda engine: (len(engine.running) + len(engine.waiting)) / engine.kv_tokens)
        output_tokens = self.chance.randint(self.output_tokens // 2, self.output_tokens * 3 // 2)
        request = Request(self.prompt * (self.turns - turns_left + 1), output_tokens)
        self.requests[id(request)] = request, turns_left
        engine.waiting.append(request)

    def _finish(self, requests: Iterable[Request]) -> None:
        for request in requests:
            _, turns_left = self.requests.pop(id(request))
            self.useful += request.output_tokens
            if turns_left > 1:
                self.thinking.append((self.ticks + self.env_ticks, turns_left - 1))
            else:
                self.leased -= 1
                self.ended += 1

    def kill(self, number: int) -> None:
        for request in self.engines[number].die():
            _, turns_left = self.requests.pop(id(request))
            self._request(turns_left)
