"""Data of earlier versions: one archive beside this file for each, named by the version."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ARCHIVES = sorted(Path(__file__).parent.glob("*.tar.xz"))


class EarlierData(NamedTuple):
    """A data directory and its backup, which must not be changed; ``expected`` is the content that the version which
    wrote them read from them."""

    data: Path
    backup: Path
    expected: dict[str, Any]


@pytest.fixture(scope="session", params=ARCHIVES, ids=lambda archive: archive.name.removesuffix(".tar.xz"))
def earlier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EarlierData:
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(request.param) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)  # an argument from Python 3.11.4 on
        packed.extractall(folder)
    return EarlierData(folder / "data", folder / "backup", json.loads((folder / "expected.json").read_bytes()))


@pytest.fixture
def data(earlier: EarlierData, tmp_path: Path) -> Path:
    """A copy of the data directory, for a service."""
    return shutil.copytree(earlier.data, tmp_path / "data")
