"""A queue that owners share fairly."""

from __future__ import annotations

import itertools

from headrace_sandbox.pool.fair_queue import FairQueue, WaitingRequest

_numbers = itertools.count()


def join(queue: FairQueue, owner: str) -> WaitingRequest:
    number = next(_numbers)
    request = WaitingRequest(
        id=f"request{number}",
        number=number,
        owner=owner,
        arrived_at=0.0,
        deadline=10.0,
        wait_s=10.0,
        memory_bytes=1,
        ttl_s=1.0,
        queue=queue,
    )
    queue.join(request)
    return request


def serve_owners(queue: FairQueue, count: int) -> str:
    """Serve this many requests; returns their owners."""
    owners = []
    for _ in range(count):
        request = queue.head()
        queue.serve(request)
        owners.append(request.owner)
    return "".join(owners)


def test_the_next_owner_is_the_one_that_holds_the_least() -> None:
    queue = FairQueue("kind")
    for owner in "aaaab":
        join(queue, owner)
    assert serve_owners(queue, 3) == "aba"
    queue.done("a")
    queue.done("a")
    join(queue, "b")
    assert serve_owners(queue, 1) == "a"  # b still holds one


def test_among_equal_owners_the_next_is_the_one_served_longest_ago() -> None:
    queue = FairQueue("kind")
    for owner in "abcabc":
        join(queue, owner)
    assert serve_owners(queue, 3) == "abc"
    for owner in "abc":
        queue.done(owner)
    assert serve_owners(queue, 3) == "abc"


def test_requests_of_one_owner_are_served_in_their_order() -> None:
    queue = FairQueue("kind")
    requests = [join(queue, "a") for _ in range(3)]
    queue.leave(requests[1])
    assert queue.head() is requests[0]
    queue.serve(requests[0])
    assert queue.head() is requests[2]
