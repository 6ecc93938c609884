"""The pool's decisions, on a simulated clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from headrace_sandbox.pool.core import Core
from headrace_sandbox.pool.due_times import MIN_DUE
from headrace_sandbox.pool.instructions import Close, Instruction, LeaseSandbox, Make, Refuse, Reset, Revoke, Start
from headrace_sandbox.pool.messages import MakeFailure, PoolSettings, Request, SandboxKind, WarmBounds
from tests.sandbox.pool.invariants import check

MIB = 1 << 20
SMALL, LARGE = SandboxKind("small", 64 * MIB), SandboxKind("large", 256 * MIB)
FLAKY = MakeFailure("sandbox-not-made", "no namespace", True)


class Simulated:
    """A core without a shell: the test ends the operations that the core starts."""

    def __init__(self, warm: Sequence[tuple[SandboxKind, WarmBounds]] = (), **bounds: Any) -> None:
        ids = itertools.count()
        self.core = Core(PoolSettings(**bounds), lambda: f"id{next(ids)}", warm)
        self.now = 1000.0
        self.answers: dict[str, Start | LeaseSandbox | Refuse] = {}
        self.making: list[str] = []
        self.cleaning: list[str] = []
        self.closing: list[str] = []
        self.revoked: set[str] = set()
        self.used: set[str] = set()
        self.request_count = itertools.count()
        self.take(self.core.tick(self.now))

    def take(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Start() | Refuse():
                    assert instruction.request not in self.answers
                    self.answers[instruction.request] = instruction
                case LeaseSandbox():
                    assert instruction.request not in self.answers
                    assert instruction.sandbox not in self.used, "handed on without a reset"
                    self.answers[instruction.request] = instruction
                    self.used.add(instruction.sandbox)
                case Make():
                    self.making.append(instruction.sandbox)
                case Reset():
                    self.cleaning.append(instruction.sandbox)
                case Close():
                    self.closing.append(instruction.sandbox)
                case Revoke():
                    self.revoked.add(instruction.lease)
        check(self.core)

    def ask(self, owner: str = "a", kind: SandboxKind | None = None, wait_s: float = 10.0, ttl_s: float = 60.0) -> str:
        request = f"request{next(self.request_count)}"
        memory_bytes = kind.memory_bytes if kind else 64 * MIB
        full = Request(id=request, owner=owner, wait_s=wait_s, memory_bytes=memory_bytes, kind=kind, ttl_s=ttl_s)
        self.take(self.core.ask(full, self.now))
        return request

    def make(self) -> None:
        self.take(self.core.made(self.making.pop(0), self.now))

    def clean(self) -> None:
        sandbox = self.cleaning.pop(0)
        self.used.discard(sandbox)
        self.take(self.core.cleaned(sandbox, self.now))

    def close(self) -> None:
        self.take(self.core.closed(self.closing.pop(0), self.now))

    def give_back(self, request: str, *, reusable: bool = True) -> None:
        hand = self.answers[request]
        assert isinstance(hand, LeaseSandbox)
        self.take(self.core.give_back(hand.lease, reusable, self.now))

    def done(self, request: str) -> None:
        self.take(self.core.done(request, self.now))

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.core.tick(self.now))

    def settle(self) -> None:
        """End all operations successfully, until none is left."""
        for _ in range(1000):
            if not (self.making or self.cleaning or self.closing):
                return
            for step, todo in ((self.make, self.making), (self.clean, self.cleaning), (self.close, self.closing)):
                while todo:
                    step()
        raise AssertionError("it never rests")


def started(pool: Simulated, *requests: str) -> list[bool]:
    return [isinstance(pool.answers.get(request), Start) for request in requests]


def test_owners_share_fairly_however_many_requests_one_owner_has() -> None:
    pool = Simulated(running=2)
    flood = [pool.ask("a") for _ in range(50)]
    late = [pool.ask("b") for _ in range(2)]
    pool.done(flood[0])
    pool.done(flood[1])
    assert started(pool, *late) == [True, False]  # one for each owner
    assert started(pool, *flood[:4]) == [True, True, True, False]
    pool.done(late[0])
    assert started(pool, late[1]) == [True]


def test_a_request_that_reaches_its_deadline_is_refused_with_the_reason() -> None:
    pool = Simulated(running=1)
    pool.ask()
    second = pool.ask(wait_s=3.0)
    pool.after(2.9)
    assert second not in pool.answers
    assert pool.core.next_due() == pytest.approx(1003.0)
    pool.after(0.1)
    refusal = pool.answers[second]
    assert isinstance(refusal, Refuse)
    assert (refusal.kind, refusal.detail, refusal.retryable) == ("no-sandbox-in-time", "no sandbox within 3 s", True)


def test_beyond_the_bound_on_waiting_requests_the_answer_is_busy() -> None:
    pool = Simulated(running=1, waiting=3)
    first = pool.ask("a")
    waiting = [pool.ask("a") for _ in range(3)]
    turned_away = pool.ask("a")
    refusal = pool.answers[turned_away]
    assert isinstance(refusal, Refuse)
    assert (refusal.kind, refusal.retryable) == ("busy", True)
    assert refusal.after_s is not None
    other = pool.ask("b")  # the bound is shared fairly too
    assert other not in pool.answers
    assert isinstance(pool.answers[waiting[-1]], Refuse)
    pool.done(first)
    assert started(pool, other) == [True]


def test_the_waiting_time_and_the_time_to_make_a_sandbox_are_separate() -> None:
    pool = Simulated(sandboxes=1)
    first = pool.ask(kind=SMALL, wait_s=30)
    pool.after(4.0)
    pool.make()
    hand = pool.answers[first]
    assert isinstance(hand, LeaseSandbox)
    assert (hand.queue_s, hand.start_s) == (0.0, 4.0)
    second = pool.ask("b", kind=SMALL, wait_s=30)
    pool.after(6.0)
    pool.give_back(first)
    pool.after(0.25)
    pool.clean()
    hand = pool.answers[second]
    assert isinstance(hand, LeaseSandbox)
    assert (hand.queue_s, hand.start_s) == (6.0, 0.25)


def test_a_suspicious_sandbox_is_closed_and_never_leased_again() -> None:
    pool = Simulated(sandboxes=1)
    first = pool.ask(kind=SMALL)
    pool.make()
    second = pool.ask(kind=SMALL)
    pool.give_back(first, reusable=False)
    assert (pool.cleaning, len(pool.closing)) == ([], 1)
    assert second not in pool.answers
    pool.close()
    pool.make()
    assert isinstance(pool.answers[second], LeaseSandbox)


def test_a_sandbox_that_cannot_be_reset_is_closed() -> None:
    pool = Simulated()
    first = pool.ask(kind=SMALL)
    pool.make()
    pool.give_back(first)
    pool.take(pool.core.not_cleaned(pool.cleaning.pop(), pool.now))
    assert len(pool.closing) == 1


def test_times_that_are_no_longer_awaited_use_bounded_memory() -> None:
    pool = Simulated(running=1, ttl_s=1e9)
    before = pool.ask(wait_s=1e9)
    for _ in range(3 * MIN_DUE):  # each of them has to wait
        newest = pool.ask(wait_s=1e9)
        pool.done(before)
        before = newest
    leased = pool.ask(kind=SandboxKind("small", MIB), ttl_s=1e8)
    pool.make()
    hand = pool.answers[leased]
    assert isinstance(hand, LeaseSandbox)
    for turn in range(3 * MIN_DUE):
        assert pool.core.renew(hand.lease, 1e8 + turn, pool.now) is not None
    assert len(list(pool.core._due)) <= MIN_DUE
    pool.after(1e8 + 3 * MIN_DUE)
    assert hand.lease in pool.revoked


def test_a_sandbox_whose_lease_expired_is_closed_and_a_renewed_lease_goes_on() -> None:
    pool = Simulated(ttl_s=100.0)
    kept, lost = pool.ask(kind=SMALL, ttl_s=10), pool.ask(kind=SMALL, ttl_s=10)
    pool.make()
    pool.make()
    pool.after(8.0)
    hand = pool.answers[kept]
    assert isinstance(hand, LeaseSandbox)
    assert pool.core.renew(hand.lease, 10, pool.now) == 10.0
    pool.after(2.0)
    assert pool.revoked == {pool.answers[lost].lease}  # type: ignore[union-attr]
    assert len(pool.closing) == 1
    pool.after(7.9)
    assert len(pool.revoked) == 1
    pool.after(0.1)
    assert len(pool.revoked) == 2
    assert pool.core.renew(hand.lease, 10, pool.now) is None


def test_a_lease_is_not_renewed_beyond_the_end_of_its_sandbox() -> None:
    pool = Simulated(ttl_s=100.0)
    first = pool.ask(kind=SMALL, ttl_s=100)
    pool.make()
    hand = pool.answers[first]
    assert isinstance(hand, LeaseSandbox)
    pool.after(90)
    assert pool.core.renew(hand.lease, 100, pool.now) == 100.0
    pool.after(90)
    assert pool.core.renew(hand.lease, 100, pool.now) == 20.0


def test_making_and_closing_are_bounded_separately() -> None:
    """All operations of one kind hang; those of the other kind go on."""
    pool = Simulated(making=1, closing=1, sandboxes=4)
    first = pool.ask(kind=SMALL)
    pool.make()
    pool.ask(kind=SMALL)
    assert len(pool.making) == 1  # and hangs
    pool.give_back(first, reusable=False)
    pool.close()
    again = Simulated(making=1, closing=1, sandboxes=4)
    first = again.ask(kind=SMALL)
    again.make()
    again.give_back(first, reusable=False)
    assert len(again.closing) == 1  # and hangs
    second = again.ask(kind=SMALL)
    again.make()
    assert isinstance(again.answers[second], LeaseSandbox)


def test_warm_sandboxes_are_kept_and_other_idle_ones_are_closed_after_a_while() -> None:
    pool = Simulated([(SMALL, WarmBounds(least=2, most=4))], idle_s=60.0)
    assert len(pool.making) == 2
    pool.settle()
    requests = [pool.ask(kind=SMALL) for _ in range(3)]
    pool.settle()
    assert all(isinstance(pool.answers[request], LeaseSandbox) for request in requests)
    for request in requests:
        pool.give_back(request)
    pool.settle()
    pool.after(61.0)
    pool.settle()
    assert pool.core.counts().sandboxes["idle"] == 2


def test_an_idle_sandbox_is_closed_when_it_is_too_old_for_the_longest_lease() -> None:
    pool = Simulated([(SMALL, WarmBounds(least=1, most=1))], idle_s=5.0, ttl_s=20.0)
    pool.make()
    pool.after(19.75)
    assert pool.closing == []
    pool.after(0.25)  # the time is reached exactly, and checked once
    assert len(pool.closing) == 1
    due = pool.core.next_due()
    assert due is None or due > pool.now


def test_making_is_retried_after_a_pause_and_a_refusal_names_the_last_failure() -> None:
    pool = Simulated()
    request = pool.ask(kind=SMALL, wait_s=2.0)
    pool.take(pool.core.not_made(pool.making.pop(), FLAKY, pool.now))
    assert pool.making == []
    pool.after(0.25)
    pool.take(pool.core.not_made(pool.making.pop(), FLAKY, pool.now))
    pool.after(2.0)
    refusal = pool.answers[request]
    assert isinstance(refusal, Refuse)
    assert refusal.detail == "no sandbox within 2 s; the last one could not be made: no namespace"
    other = pool.ask(kind=LARGE)
    pool.take(pool.core.not_made(pool.making.pop(), MakeFailure("not-offered", "no such thing", False), pool.now))
    refused = pool.answers[other]
    assert isinstance(refused, Refuse)
    assert (refused.kind, refused.retryable) == ("not-offered", False)


def test_memory_limits_never_add_up_to_more_than_the_pools_memory_and_large_requests_do_not_starve() -> None:
    pool = Simulated(running=100, memory_bytes=300 * MIB)
    small = [pool.ask() for _ in range(4)]  # 64 MiB each
    large = pool.ask(kind=LARGE)
    after = [pool.ask(wait_s=100.0) for _ in range(3)]
    assert started(pool, *small, *after) == [True] * 4 + [False] * 3
    for request in small:
        pool.done(request)
    pool.make()
    assert isinstance(pool.answers[large], LeaseSandbox)
    assert started(pool, *after) == [False] * 3
    pool.give_back(large)
    pool.settle()
    assert pool.core.counts().sandboxes["idle"] == 0  # it was closed for the larger request
    assert started(pool, *after) == [True] * 3


def test_a_request_that_waits_for_leased_memory_does_not_block_smaller_ones() -> None:
    pool = Simulated(running=100, memory_bytes=400 * MIB)
    held = pool.ask(kind=LARGE, wait_s=100.0)
    pool.make()
    other = pool.ask("b", kind=SandboxKind("other", 200 * MIB), wait_s=100.0)
    assert other not in pool.answers
    assert started(pool, *[pool.ask("c") for _ in range(2)]) == [True] * 2
    pool.give_back(held)
    pool.settle()
    assert pool.making == []
    for request in [name for name, answer in pool.answers.items() if isinstance(answer, Start)]:
        pool.done(request)
    pool.settle()
    assert isinstance(pool.answers[other], LeaseSandbox)


def test_a_request_that_can_never_be_served_is_refused_at_once() -> None:
    pool = Simulated(memory_bytes=100 * MIB, ttl_s=60.0)
    for request, kind in ((pool.ask(kind=LARGE), "too-large"), (pool.ask(kind=SMALL, ttl_s=61.0), "ttl-too-long")):
        refusal = pool.answers[request]
        assert isinstance(refusal, Refuse)
        assert (refusal.kind, refusal.retryable) == (kind, False)


def test_the_memory_of_a_sandbox_that_cannot_be_closed_counts_as_taken() -> None:
    pool = Simulated(sandboxes=1)
    first = pool.ask(kind=SMALL)
    pool.make()
    pool.give_back(first, reusable=False)
    pool.take(pool.core.not_closed(pool.closing.pop(), pool.now))
    pool.ask(kind=SMALL)
    assert pool.making == []
    counts = pool.core.counts()
    assert (counts.sandboxes["stuck"], counts.memory_bytes) == (1, SMALL.memory_bytes)


def test_the_state_of_former_kinds_and_owners_is_deleted() -> None:
    pool = Simulated(reuse=False)
    for number in range(10):
        request = pool.ask(f"run{number}", kind=SandboxKind(f"kind{number}", MIB))
        pool.settle()
        pool.give_back(request)
        pool.settle()
        pool.done(pool.ask(f"run{number}"))
        refused = pool.ask(kind=SandboxKind(f"other{number}", MIB), wait_s=0.0)
        assert refused not in pool.answers or isinstance(pool.answers[refused], Refuse)
        pool.settle()
        pool.after(100.0)
        pool.settle()
    core = pool.core
    assert (list(core._queues), core._kinds, core._pauses, core._pooled) == ([""], {}, {}, {})
    assert core._queues[""]._served == {}


class Histories(RuleBasedStateMachine):
    """Every request is answered once, in any order of events, and nothing is left at the end."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.pool = Simulated(
            [(SMALL, WarmBounds(least=1, most=3))],
            running=2,
            memory_bytes=600 * MIB,
            waiting=5,
            sandboxes=2,
            making=2,
            closing=1,
            idle_s=5.0,
            ttl_s=20.0,
        )
        self.all: list[str] = []
        self.withdrawn: set[str] = set()
        self.done: set[str] = set()

    @rule(
        target=requests,
        owner=st.sampled_from("abc"),
        kind=st.sampled_from([None, None, SMALL, LARGE]),
        wait_s=st.sampled_from([0.0, 1.0, 10.0]),
        ttl_s=st.sampled_from([1.0, 20.0]),
    )
    def ask(self, owner: str, kind: SandboxKind | None, wait_s: float, ttl_s: float) -> str:
        request = self.pool.ask(owner, kind, wait_s, ttl_s)
        self.all.append(request)
        return request

    @rule(request=consumes(requests), is_reusable=st.booleans())
    def end_or_withdraw(self, request: str, is_reusable: bool) -> None:
        match self.pool.answers.get(request):
            case Start():
                self.done.add(request)
                self.pool.done(request)
            case LeaseSandbox():
                self.pool.give_back(request, reusable=is_reusable)
            case None:
                self.withdrawn.add(request)
                self.pool.take(self.pool.core.withdraw(request, self.pool.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 25.0]))
    def time_goes_on(self, seconds: float) -> None:
        self.pool.after(seconds)

    @precondition(lambda self: self.pool.making)
    @rule(outcome=st.sampled_from(["made", "made", "flaky", "hopeless"]))
    def end_making(self, outcome: str) -> None:
        if outcome == "made":
            self.pool.make()
            return
        why = FLAKY if outcome == "flaky" else MakeFailure("not-offered", "no", False)
        self.pool.take(self.pool.core.not_made(self.pool.making.pop(0), why, self.pool.now))

    @precondition(lambda self: self.pool.cleaning)
    @rule(is_good=st.booleans())
    def end_cleaning(self, is_good: bool) -> None:
        if is_good:
            self.pool.clean()
        else:
            self.pool.take(self.pool.core.not_cleaned(self.pool.cleaning.pop(0), self.pool.now))

    @precondition(lambda self: self.pool.closing)
    @rule()
    def end_closing(self) -> None:
        self.pool.close()

    @rule(request=requests, ttl_s=st.sampled_from([1.0, 20.0, 100.0]))
    def renew(self, request: str, ttl_s: float) -> None:
        hand = self.pool.answers.get(request)
        if isinstance(hand, LeaseSandbox):
            granted_s = self.pool.core.renew(hand.lease, ttl_s, self.pool.now)
            assert (granted_s is None) == (hand.lease not in self.pool.core._leases)
            assert granted_s is None or granted_s <= 20.0 + 1e-6

    @invariant()
    def what_was_due_is_done(self) -> None:
        due = self.pool.core.next_due()
        assert due is None or due > self.pool.now

    def teardown(self) -> None:
        pool = self.pool
        pool.settle()
        for request, answer in list(pool.answers.items()):
            if isinstance(answer, Start) and request not in self.done:
                self.done.add(request)
                pool.done(request)
        pool.settle()
        pool.after(50.0)  # beyond every deadline and lease
        pool.settle()
        for request in self.all:
            assert (request in pool.answers) or request in self.withdrawn
        for request, answer in list(pool.answers.items()):
            if isinstance(answer, Start) and request not in self.done:
                self.done.add(request)
                pool.done(request)
        pool.take(pool.core.drain(pool.now))
        pool.settle()
        counts = pool.core.counts()
        assert (counts.waiting, counts.leases, counts.memory_bytes) == (0, 0, 0)
        assert pool.core._pooled == {}


Histories.TestCase.settings = settings(max_examples=500, stateful_step_count=20, deadline=None)
TestHistories = Histories.TestCase
