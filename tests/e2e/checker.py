"""An independent checker: holds what was seen to be acknowledged against what the service has after all its crashes.

* No acknowledged trajectory is lost: each is there once, with the same bytes.
* No batch is acked twice: the log has one ack for each, and it is one that was answered.
* A redelivered batch is byte-identical.
* What acknowledged records refer to is there, with the bytes of its name.
* No trajectory is in two acked batches of a run with one use.

It reads the log with a reader of its own, not with the service's.
"""

from __future__ import annotations

import hashlib
import struct
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec

from headrace import Client
from tests.e2e.recorder import Acknowledged

HEADER_BYTES = 64
ALIGNMENT = 64
CONTROL = 2


@dataclass
class Findings:
    """What is wrong (nothing, if the service keeps its promise), and how much was checked."""

    wrong: list[str] = field(default_factory=list)
    records: int = 0
    batches: int = 0
    redelivered: int = 0
    acks: int = 0
    assets: int = 0


def check(url: str, run: str, data: Path, seen: Acknowledged) -> Findings:
    """Ask the service at ``url``, and read its data directory."""
    found = Findings(records=len(seen.records), batches=len(seen.batches), acks=len(seen.acks), assets=len(seen.assets))
    _check_records(url, run, seen, found)
    _check_assets(url, seen, found)
    _check_batches(seen, found)
    _check_acks(data, seen, found)
    _check_uses(seen, found)
    return found


def _check_records(url: str, run: str, seen: Acknowledged, found: Findings) -> None:
    with Client(url, keepalive=False) as client:
        stored = {}
        for item in client.trajectories(run):
            if item.episode in stored:
                found.wrong.append(f"episode {item.episode} has two terminal records")
            stored[item.episode] = item.id
        for episode, hashes in seen.records.items():
            if len(hashes) != 1:
                found.wrong.append(f"episode {episode} was accepted {len(hashes)} times")
            if episode not in stored:
                found.wrong.append(f"episode {episode} was acknowledged and is lost")
                continue
            try:
                content = fetch(f"{url}/v1/trajectories/{stored[episode]}")
            except urllib.error.HTTPError as error:
                found.wrong.append(f"episode {episode} was acknowledged and cannot be fetched: {error.code}")
                continue
            if hashlib.sha256(content).hexdigest() != hashes[0]:
                found.wrong.append(f"episode {episode} is stored with other bytes than were acknowledged")


def _check_assets(url: str, seen: Acknowledged, found: Findings) -> None:
    for name in sorted(seen.assets):
        try:
            content = fetch(f"{url}/v1/assets/{name}")
        except urllib.error.HTTPError as error:
            found.wrong.append(f"asset {name} of an acknowledged record cannot be fetched: {error.code}")
            continue
        if hashlib.sha256(content).hexdigest() != name:
            found.wrong.append(f"asset {name} has other bytes than its name says")


def _check_batches(seen: Acknowledged, found: Findings) -> None:
    for batch, bodies in seen.batches.items():
        found.redelivered += len(bodies) > 1
        if len(set(bodies)) != 1:
            found.wrong.append(f"batch {batch} was served as {len(set(bodies))} different bodies")
        if sorted(seen.generations[batch]) != seen.generations[batch]:
            found.wrong.append(f"batch {batch} went back a generation: {seen.generations[batch]}")


def _check_acks(data: Path, seen: Acknowledged, found: Findings) -> None:
    logged = Counter(record["batch"] for record in control_records(data) if record["type"] == "BatchAcked")
    found.wrong += [f"batch {batch} was acked {count} times" for batch, count in logged.items() if count > 1]
    found.wrong += [
        f"batch {batch} was acked under {len(acks)} leases" for batch, acks in seen.acks.items() if len(acks) > 1
    ]
    found.wrong += [f"the ack of batch {batch} was answered and is lost" for batch in seen.acks if not logged[batch]]


def _check_uses(seen: Acknowledged, found: Findings) -> None:
    uses = Counter(trajectory for batch in seen.acks for trajectory in seen.members[batch])
    found.wrong += [f"trajectory {item} is in {count} acked batches" for item, count in uses.items() if count > 1]


def control_records(data: Path) -> Iterator[dict[str, Any]]:
    """Control records of the log. What is no whole frame is passed over, and a second copy where the first is whole."""
    for file in sorted((data / "log").glob("*.log")):
        content, offset, first = file.read_bytes(), 0, -1
        while offset + HEADER_BYTES <= len(content):
            frame = _frame(content, offset)
            if frame is None:
                offset += ALIGNMENT
                continue
            kind, copy, payload = frame
            size = HEADER_BYTES + -(-len(payload) // ALIGNMENT) * ALIGNMENT
            if kind == CONTROL and (copy == 0 or first != offset - size):
                decoded = msgspec.msgpack.decode(payload)
                yield from decoded if isinstance(decoded, list) else [decoded]
            first = offset if copy == 0 else -1
            offset += size


def _frame(content: bytes, offset: int) -> tuple[int, int, bytes] | None:
    """Type, copy and payload of the frame that begins here, if both its checksums match."""
    magic, kind, copy, length = struct.unpack_from("<8sHHQ", content, offset)
    header_crc, payload_crc = struct.unpack_from("<II", content, offset + 20)
    payload = content[offset + HEADER_BYTES : offset + HEADER_BYTES + length]
    if magic != b"HRLOGFRM" or google_crc32c.value(content[offset : offset + 20]) != header_crc:
        return None
    if len(payload) != length or google_crc32c.value(payload) != payload_crc:
        return None
    return kind, copy, payload


def fetch(url: str) -> bytes:
    """The body of a GET, without the client under test."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        return bytes(answer.read())
