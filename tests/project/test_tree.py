"""The check of addresses and paths, applied to this tree and to a file that breaks every rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import check_tree


def test_no_file_contains_a_registry_or_a_path_or_address_of_one_machine() -> None:
    assert [finding for path in check_tree.files() for finding in check_tree.findings(path)] == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("see https://files.python" + "hosted.org/x", "a package registry"),
        ("cd /ro" + "ot/project", "a directory of one machine"),
        ("listen on 10.0" + ".0.7 now", "an IP address"),
    ],
)
def test_a_line_that_names_one_machine_is_reported(
    text: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_tree, "ROOT", tmp_path)
    (tmp_path / "notes.txt").write_text(f"fine\n{text}\n")
    (finding,) = check_tree.findings(tmp_path / "notes.txt")
    assert (finding.line, finding.what) == (2, what)


@pytest.mark.parametrize(
    "text", ["127.0.0.1:8470", "0.0.0.0", "192.0.2.7", "version 1.2.3", "{base}/wo" + "rk/item", "1.2.3.4.5"]
)
def test_loopback_and_documentation_addresses_and_urls_are_allowed(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_tree, "ROOT", tmp_path)
    (tmp_path / "notes.txt").write_text(text)
    assert check_tree.findings(tmp_path / "notes.txt") == []
