"""Untrusted archives are read into plain entries, or refused whole."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import SandboxFailure
from headrace_sandbox.guest.files import MOST_DEPTH
from headrace_sandbox.runtimes.shared.archives import (
    MOST_STREAMS,
    ArchiveEntry,
    entries_of,
    entries_of_listing,
    pack_listing,
    tar_of,
)

MOST = 1 << 20


def tar(*members: tuple[str, dict[str, Any]], form: int = tarfile.PAX_FORMAT) -> bytes:
    """An archive of members: a name, and fields of a TarInfo or ``content``."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as made:
        for name, fields in members:
            info = tarfile.TarInfo(name)
            content = fields.get("content", b"")
            info.size = len(content)
            for key, value in fields.items():
                if key != "content":
                    setattr(info, key, value)
            made.addfile(info, io.BytesIO(content))
    return file.getvalue()


def why_refused(archive: bytes, most_bytes: int = MOST, **bounds: int) -> str:
    with pytest.raises(SandboxFailure) as caught:
        entries_of(archive, most_bytes, **bounds)
    assert caught.value.kind in ("bad-archive", "archive-too-large")
    assert not caught.value.retryable
    return caught.value.kind


def test_files_folders_and_links_are_read_as_plain_entries() -> None:
    archive = tar(
        ("./", {"type": tarfile.DIRTYPE}),
        ("./a/", {"type": tarfile.DIRTYPE}),
        ("./a/run.sh", {"content": b"#!", "mode": 0o750}),
        ("a/link", {"type": tarfile.SYMTYPE, "linkname": "../a/run.sh"}),
        ("again", {"type": tarfile.LNKTYPE, "linkname": "./a/run.sh"}),
    )
    assert entries_of(archive, MOST) == [
        ArchiveEntry(path="a", kind="folder"),
        ArchiveEntry(path="a/run.sh", kind="file", content=b"#!", executable=True),
        ArchiveEntry(path="a/link", kind="link", target="../a/run.sh"),
        ArchiveEntry(path="again", kind="file", content=b"#!", executable=True),
    ]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_an_archive_may_be_packed(pack: Any) -> None:
    archive = tar(("x", {"content": b"hello"}))
    there = [ArchiveEntry(path="x", kind="file", content=b"hello")]
    assert entries_of(pack(archive), MOST) == there
    streams = b"".join(pack(archive[at : at + 999]) + bytes(4 * at) for at in range(0, len(archive), 999))
    assert entries_of(streams + bytes(MOST), MOST) == there
    assert why_refused(pack(archive)[:-20]) == "bad-archive"


def test_an_archive_of_very_many_streams_is_refused() -> None:
    assert why_refused(gzip.compress(b"") * (MOST_STREAMS + 1)) == "bad-archive"


def test_nested_headers_are_refused() -> None:
    for kind, content in ((tarfile.GNUTYPE_LONGNAME, b"name"), (tarfile.XHDTYPE, b"12 path=abc\n")):
        info = tarfile.TarInfo("x")
        info.type, info.size = kind, len(content)
        assert why_refused((info.tobuf(tarfile.GNU_FORMAT) + content.ljust(512, b"\0")) * 2000) == "bad-archive"


def test_a_path_deeper_than_can_be_downloaded_is_refused() -> None:
    deepest = "/".join(["a"] * (MOST_DEPTH + 1))
    assert [entry.path for entry in entries_of(tar((deepest, {})), MOST)] == [deepest]
    assert why_refused(tar((f"a/{deepest}", {}))) == "bad-archive"


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("/etc/passwd", {"content": b"x"}),
        ("../x", {"content": b"x"}),
        ("a/../../x", {"content": b"x"}),
        ("a/./x", {"content": b"x"}),
        ("a//x", {"content": b"x"}),
        ("..", {"type": tarfile.DIRTYPE}),
        ("x" * 300, {"content": b"x"}),
        ("x/" * 2100, {"type": tarfile.DIRTYPE}),
        ("setuid", {"content": b"x", "mode": 0o4755}),
        ("setgid", {"content": b"x", "mode": 0o2755}),
        ("null", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}),
        ("disk", {"type": tarfile.BLKTYPE, "devmajor": 8, "devminor": 0}),
        ("pipe", {"type": tarfile.FIFOTYPE}),
        ("out", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
        ("out", {"type": tarfile.SYMTYPE, "linkname": ".."}),
        ("a/out", {"type": tarfile.SYMTYPE, "linkname": "b/../../../etc"}),
        ("a/b/out", {"type": tarfile.SYMTYPE, "linkname": "up/.."}),  # out, if `up` leads to the folder itself
        ("hard", {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"}),
        ("hard", {"type": tarfile.LNKTYPE, "linkname": "../../etc/passwd"}),
        ("hard", {"type": tarfile.LNKTYPE, "linkname": "not/there/before"}),
        ("unknown", {"type": b"Z"}),
        ("sparse", {"content": b"x", "pax_headers": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}}),
    ],
)
def test_entries_that_lead_out_or_are_not_files_folders_or_links_are_refused(name: str, fields: dict[str, Any]) -> None:
    assert why_refused(tar(("fine", {"content": b"x"}), (name, fields))) == "bad-archive"


def test_an_entry_below_a_link_or_a_file_is_refused() -> None:
    link = ("a", {"type": tarfile.SYMTYPE, "linkname": "b"})
    assert why_refused(tar(("b", {"type": tarfile.DIRTYPE}), link, ("a/x", {"content": b"x"}))) == "bad-archive"
    assert why_refused(tar(("a/x", {"content": b"x"}), ("a", {"content": b"x"}))) == "bad-archive"


def test_bombs_are_refused_without_being_unpacked() -> None:
    zeros = tar(("zeros", {"content": bytes(50 << 20)}))
    assert why_refused(gzip.compress(zeros), 1 << 30) == "archive-too-large"  # 1,000 times as large
    assert why_refused(zeros) == "archive-too-large"
    assert why_refused(tar(*((f"{n}", {}) for n in range(30))), most_entries=20) == "archive-too-large"
    one = ("one", {"content": bytes(600_000)})
    hard = [(f"{n}", {"type": tarfile.LNKTYPE, "linkname": "one"}) for n in range(100)]
    assert why_refused(tar(one, *hard)) == "archive-too-large"
    huge = tarfile.TarInfo("huge")
    huge.size = 1 << 40
    assert why_refused(huge.tobuf() + bytes(1024)) == "archive-too-large"


def test_a_header_that_claims_a_huge_size_uses_no_memory() -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 33
    assert why_refused(info.tobuf() + bytes(4096)) == "bad-archive"


names = st.text(st.sampled_from("ab./\0é-"), max_size=8)
kinds = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(names, kinds, names, st.integers(0, 0o7777), st.binary(max_size=9)), max_size=5))
def test_entries_of_any_archive_stay_within_the_folder(members: list[tuple[str, bytes, str, int, bytes]]) -> None:
    archive = tar(
        *(
            (
                name,
                {
                    "type": kind,
                    "linkname": target,
                    "mode": mode,
                    **({"content": content} if kind == tarfile.REGTYPE else {}),
                },
            )
            for name, kind, target, mode, content in members
        ),
        form=tarfile.GNU_FORMAT,
    )
    try:
        entries = entries_of(archive, MOST)
    except SandboxFailure:
        return
    links = {entry.path for entry in entries if entry.kind == "link"}
    for entry in entries:
        parts = entry.path.split("/")
        assert parts
        assert not set(parts) & {"", ".", ".."}
        assert not any("/".join(parts[:n]) in links for n in range(1, len(parts)))
        depth = len(parts) - 1
        for part in entry.target.split("/"):
            depth += {"..": -1, "": 0, ".": 0}.get(part, 1)
            assert depth >= 0
    assert entries_of(tar_of(entries), MOST) == entries


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=2000), st.booleans())
def test_bytes_that_are_not_an_archive_are_refused(data: bytes, is_packed: bool) -> None:
    try:
        entries_of(gzip.compress(data) if is_packed else data, MOST)
    except SandboxFailure as failure:
        assert failure.kind in ("bad-archive", "archive-too-large")  # noqa: PT017 - an empty archive is fine


def test_a_listing_from_inside_is_validated() -> None:
    entries = [
        ArchiveEntry(path="a", kind="folder"),
        ArchiveEntry(path="a/b", kind="file", content=b"\0\n", executable=True),
    ]
    items, content = pack_listing(entries)
    assert entries_of_listing(json.dumps(items).encode() + b"\n" + content) == entries
    good = {"path": "a", "kind": "file", "size_bytes": 1, "executable": False}
    for wrong in (
        {"path": "../a"},
        {"path": "/a"},
        {"path": ""},
        {"kind": "link"},
        {"size_bytes": 2},
        {"size_bytes": -1},
        {"size_bytes": None},
    ):
        with pytest.raises(SandboxFailure) as caught:
            entries_of_listing(json.dumps([{**good, **wrong}]).encode() + b"\nx")
        assert caught.value.kind == "bad-archive"
    for line in (b"", b"{}", b"[1]", b"null", b"[[]]"):
        try:
            assert entries_of_listing(line + b"\n") == []
        except SandboxFailure as failure:
            assert failure.kind == "bad-archive"  # noqa: PT017 - an empty list is fine
