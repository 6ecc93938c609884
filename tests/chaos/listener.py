"""A client that waits at the orchestrator of a campaign, and counts how often it was told that the log's writer ended.

* It waits in a long poll of a run without episodes, which only a failure or a restart ends.
* It is told by a typed error that names the loss.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

from headrace import Client
from headrace.errors import HeadraceError

SPEC: dict[str, Any] = {"name": "quiet", "environments": [{"id": "no:one"}], "pool": "nobody"}
"""A run that no worker serves."""

_PAUSE_S = 0.02
"""Pause after an error: the orchestrator is down most of the time after one."""

_POLL_S = 2.0


class LossListener:
    """A thread that waits for batches of the run of ``SPEC`` until the block ends."""

    def __init__(self, url: str) -> None:
        self.losses = 0
        """Number of times that a client was told of a lost writer."""
        self._url = url
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()

    def _listen(self) -> None:
        with Client(self._url, learner="listener", keepalive=False, retry_for_s=0) as client:
            while not self._ending.is_set():
                try:
                    client.pull("quiet", timeout_s=_POLL_S)
                except HeadraceError as error:
                    self.losses += "the process that writes the log ended" in error.detail
                    self._ending.wait(_PAUSE_S)
