"""A simulated engine with a KV cache and a queue, and a run that plays episodes on several of them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace_orchestrator.policy_servers import admission
from headrace_orchestrator.policy_servers.admission import Admission, Load, ServerPoll

TICKS_A_POLL = 10


@dataclass
class Request:
    prompt: int
    wanted: int
    done: float = 0.0

    @property
    def held(self) -> float:
        return self.prompt + self.done


@dataclass
class Engine:
    """Gives every running request a token a tick, up to ``speed`` in all. Takes from its queue while the KV cache holds
    the prompt; preempts the youngest where it overflows, which starts anew later. ``blind``: share of readings whose
    gauges say nothing."""

    kv_tokens: int
    most: int = 256
    speed: float = 1e9
    blind: float = 0.0
    up: bool = True
    paused: bool = False
    running: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    completed: int = 0
    preemptions: int = 0
    tokens: float = 0.0

    def tick(self) -> list[Request]:
        """Returns the requests that are done."""
        if self.paused:
            return []
        held = sum(request.held for request in self.running)
        while self.waiting and len(self.running) < self.most and held + self.waiting[0].prompt < self.kv_tokens:
            request = self.waiting.popleft()
            held += request.prompt
            self.running.append(request)
        share = min(1.0, self.speed / max(1, len(self.running)))
        for request in self.running:
            request.done += share
        self.tokens += share * len(self.running)
        held += share * len(self.running)
        while held > self.kv_tokens and len(self.running) > 1:
            request = self.running.pop()
            held -= request.held
            request.done = 0.0
            self.waiting.appendleft(request)
            self.preemptions += 1
        over = [request for request in self.running if request.done >= request.wanted]
        self.running = [request for request in self.running if request.done < request.wanted]
        self.completed += len(over)
        return over

    def die(self) -> list[Request]:
        lost = [*self.running, *self.waiting]
        self.running, self.waiting = [], deque()
        self.completed, self.preemptions, self.tokens, self.up = 0, 0, 0.0, False
        return lost

    @property
    def used(self) -> float:
        """Share in use of what it has least of: KV cache, sequences, speed."""
        held = sum(request.held for request in self.running)
        return min(1.0, max(held / self.kv_tokens, len(self.running) / self.most, len(self.running) / self.speed))

    def read(self, chance: random.Random) -> Load:
        if chance.random() < self.blind:
            return Load(0, 0, 0, self.completed, self.preemptions, self.tokens)
        used = sum(request.held for request in self.running) / self.kv_tokens
        return Load(len(self.running), len(self.waiting), min(1.0, used), self.completed, self.preemptions, self.tokens)


@dataclass
class World:
    """A run of endless episodes of ``turns`` turns; between two of them the environment takes ``pause`` ticks.
    ``fixed``: that many at a time instead of what the controller says."""

    engines: list[Engine]
    turns: int = 4
    prompt: int = 40
    wanted: int = 60
    pause: int = 20
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
        self.at: dict[int, tuple[Request, int]] = {}
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
        """Let time pass; returns what was attainable at each poll."""
        begun = len(self.history)
        for _ in range(count):
            for _ in range(TICKS_A_POLL):
                self._tick()
            seen = {str(number): self._seen(engine) for number, engine in enumerate(self.engines)}
            self.state = admission.poll(self.state, seen, self.leased)
            self.used += sum(engine.used for engine in self.engines) / len(self.engines)
            self.history.append(self.state.attainable or 0)
        return self.history[begun:]

    def _seen(self, engine: Engine) -> ServerPoll:
        if not engine.up:
            return ServerPoll("away")
        return ServerPoll("paused" if engine.paused else "serving", engine.read(self.chance))

    def _tick(self) -> None:
        self.ticks += 1
        while self.leased < self.limit:
            self.leased += 1
            self._ask(self.turns)
        while self.thinking and self.thinking[0][0] <= self.ticks:
            self._ask(self.thinking.popleft()[1])
        for engine in self.engines:
            self._over(engine.tick() if engine.up else [])

    def _ask(self, left: int) -> None:
        up = [engine for engine in self.engines if engine.up]
        if not up:  # its server is away: tried again later
            self.thinking.append((self.ticks + 10, left))
            return
        engine = min(up, key=lambda one: (len(one.running) + len(one.waiting)) / one.kv_tokens)
        wanted = self.chance.randint(self.wanted // 2, self.wanted * 3 // 2)
        request = Request(self.prompt * (self.turns - left + 1), wanted)
        self.at[id(request)] = request, left
        engine.waiting.append(request)

    def _over(self, requests: Iterable[Request]) -> None:
        for request in requests:
            _, left = self.at.pop(id(request))
            self.useful += request.wanted
            if left > 1:
                self.thinking.append((self.ticks + self.pause, left - 1))
            else:
                self.leased -= 1
                self.ended += 1

    def kill(self, number: int) -> None:
        for request in self.engines[number].die():
            _, left = self.at.pop(id(request))
            self._ask(left)
