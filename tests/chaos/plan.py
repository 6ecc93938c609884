"""The plan of one process: its files and addresses, and the crash point at which it dies."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parameters of one start of a process."""

    folder: Path
    """Folder with ``data``, ``synced``, ``version`` and the output of the processes."""
    url: str
    port: int = 0
    name: str = ""
    phase: str = ""
    passes: int = 1
    seed: int = 0
    log_file_bytes: int = 128 << 10
    sync_s: float = 0.0
    fails_at: int = 0
    """Number of the sync of the log at which the disk begins to fail for a moment; 0: never."""
    is_cut: bool = False
    """Whether the orchestrator's death is a power cut: then no process that writes for it outlives it."""
    fault: str = ""
    slots: int = 8
    turn_s: float = 0.03

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def synced_dir(self) -> Path:
        return self.folder / "synced"

    @property
    def lost(self) -> Path:
        """A file that exists once the log writer was killed alone."""
        return self.folder / "writer-lost"

    @property
    def ready(self) -> Path:
        """A file that exists while the orchestrator answers requests."""
        return self.folder / "ready"

    def as_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(**{**fields, "folder": Path(fields["folder"])})
