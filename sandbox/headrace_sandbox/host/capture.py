"""Keeps the head and the tail of a stream in bounded memory.

* Of any amount of data, at most ``kept_bytes`` are kept: the first half from the head, the rest from the tail.
* A stream that fits is kept whole.
"""

from __future__ import annotations

from collections import deque

from headrace_sandbox.result import Output


class Capture:
    """The kept part of one stream."""

    def __init__(self, kept_bytes: int) -> None:
        self._head_bytes = kept_bytes - kept_bytes // 2
        self._tail_bytes = kept_bytes // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._in_tail = 0
        self.total_bytes = 0

    def feed(self, data: bytes) -> None:
        """Add the next bytes of the stream."""
        self.total_bytes += len(data)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data or not self._tail_bytes:
            return
        self._tail.append(data[-self._tail_bytes :])
        self._in_tail += len(self._tail[-1])
        while self._in_tail - len(self._tail[0]) >= self._tail_bytes:
            self._in_tail -= len(self._tail.popleft())

    def output(self) -> Output:
        """The kept head and tail, with the size of the whole stream."""
        tail = b"".join(self._tail)[-self._tail_bytes :] if self._tail else b""
        if self.total_bytes == len(self._head) + len(tail):
            return Output(head=bytes(self._head) + tail, total_bytes=self.total_bytes)
        return Output(head=bytes(self._head), tail=tail, total_bytes=self.total_bytes)
