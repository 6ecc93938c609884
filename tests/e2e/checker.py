"""An independent checker: compares everything that was acknowledged with the data that the service has after crashes.

* No acknowledged trajectory is lost: each is there once, with the same bytes.
* No batch is acked twice, and every ack that was answered is in the log.
* A redelivered batch is byte-identical.
* Assets of acknowledged records are stored, and their bytes match their names.
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
    """Violations of the service's promises, and the number of checked items."""

    violations: list[str] = field(default_factory=list)
    records: int = 0
    batches: int = 0
    redelivered: int = 0
    acks: int = 0
    assets: int = 0


def check(url: str, run: str, data: Path, acknowledged: Acknowledged) -> Findings:
    """Check the service at ``url`` and its data directory."""
    findings = Findings(
        records=len(acknowledged.records),
        batches=len(acknowledged.batches),
        acks=len(acknowledged.acks),
        assets=len(acknowledged.assets),
    )
    _check_records(url, run, acknowledged, findings)
    _check_assets(url, acknowledged, findings)
    _check_batches(acknowledged, findings)
    _check_acks(data, acknowledged, findings)
    _check_uses(acknowledged, findings)
    return findings


def _check_records(url: str, run: str, acknowledged: Acknowledged, findings: Findings) -> None:
    with Client(url, keepalive=False) as client:
        stored = {}
        for item in client.trajectories(run):
            if item.episode in stored:
                findings.violations.append(f"episode {item.episode} has two terminal records")
            stored[item.episode] = item.id
        for episode, hashes in acknowledged.records.items():
            if len(hashes) != 1:
                findings.violations.append(f"episode {episode} was accepted {len(hashes)} times")
            if episode not in stored:
                findings.violations.append(f"episode {episode} was acknowledged and is lost")
                continue
            try:
                content = fetch(f"{url}/v1/trajectories/{stored[episode]}")
            except urllib.error.HTTPError as error:
                findings.violations.append(f"episode {episode} was acknowledged and cannot be fetched: {error.code}")
                continue
            if hashlib.sha256(content).hexdigest() != hashes[0]:
                findings.violations.append(f"episode {episode} is stored with other bytes than were acknowledged")


def _check_assets(url: str, acknowledged: Acknowledged, findings: Findings) -> None:
    for name in sorted(acknowledged.assets):
        try:
            content = fetch(f"{url}/v1/assets/{name}")
        except urllib.error.HTTPError as error:
            findings.violations.append(f"asset {name} of an acknowledged record cannot be fetched: {error.code}")
            continue
        if hashlib.sha256(content).hexdigest() != name:
            findings.violations.append(f"asset {name} has other bytes than its name says")


def _check_batches(acknowledged: Acknowledged, findings: Findings) -> None:
    for batch, bodies in acknowledged.batches.items():
        findings.redelivered += len(bodies) > 1
        if len(set(bodies)) != 1:
            findings.violations.append(f"batch {batch} was served as {len(set(bodies))} different bodies")
        if sorted(acknowledged.generations[batch]) != acknowledged.generations[batch]:
            findings.violations.append(f"batch {batch} went back a generation: {acknowledged.generations[batch]}")


def _check_acks(data: Path, acknowledged: Acknowledged, findings: Findings) -> None:
    logged = Counter(record["batch"] for record in control_records(data) if record["type"] == "BatchAcked")
    findings.violations += [f"batch {batch} was acked {count} times" for batch, count in logged.items() if count > 1]
    findings.violations += [
        f"batch {batch} was acked under {len(acks)} leases"
        for batch, acks in acknowledged.acks.items()
        if len(acks) > 1
    ]
    findings.violations += [
        f"the ack of batch {batch} was answered and is lost" for batch in acknowledged.acks if not logged[batch]
    ]


def _check_uses(acknowledged: Acknowledged, findings: Findings) -> None:
    uses = Counter(trajectory for batch in acknowledged.acks for trajectory in acknowledged.members[batch])
    findings.violations += [
        f"trajectory {item} is in {count} acked batches" for item, count in uses.items() if count > 1
    ]


def control_records(data: Path) -> Iterator[dict[str, Any]]:
    """Events in the control frames of the log. Damaged frames are skipped, and second copies of intact ones."""
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
    """Fetch the body of a URL without the client under test."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        return bytes(answer.read())
