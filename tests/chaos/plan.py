"""One life of a process: where it runs, and where it is to die."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a process is started with."""

    folder: Path
    """Holds ``data``, ``vault``, ``version`` and the processes' output."""
    url: str
    port: int = 0
    name: str = ""
    phase: str = ""
    passes: int = 1
    seed: int = 0
    log_file_bytes: int = 128 << 10
    sync_s: float = 0.0
    refuses_at: int = 0
    """From this sync of the log on the disk refuses, for a moment; 0: never."""
    is_cut: bool = False
    """Whether an orchestrator dies with the power: then nothing outlives it that writes for it."""
    mutant: str = ""
    slots: int = 8
    turn_s: float = 0.03

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def vault(self) -> Path:
        return self.folder / "vault"

    @property
    def lost(self) -> Path:
        """A file that is there once the process that writes the log was killed alone."""
        return self.folder / "writer-lost"

    @property
    def ready(self) -> Path:
        """A file that is there once the orchestrator answers requests."""
        return self.folder / "ready"

    def as_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Self:
        given = json.loads(text)
        return cls(**{**given, "folder": Path(given["folder"])})
