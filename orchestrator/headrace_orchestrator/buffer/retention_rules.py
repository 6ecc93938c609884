"""Which files of the log may be deleted: the oldest, whole, as soon as a rule of retention says so.

* Nothing is deleted unless a rule says so; each rule counts alone.
* A file that a live record lies in, or that a start needs, stays; and so do all files behind it.
* Files are small beside what is kept, so that little is kept longer than that.
* By age: a file goes when its newest record is older. By count and by bytes: when what stays still reaches the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

FILES_KEPT = 4
"""What is kept lies in so many files at least: then at most a quarter more than that is there."""

MIN_FILE_BYTES = 1 << 20
"""No smaller file, however little is kept: each has a head."""


@dataclass(frozen=True, kw_only=True)
class RetentionRules:
    """What is kept at least; None: this rule deletes nothing."""

    age_s: float | None = None
    """Records younger than this, in seconds."""
    trajectories: int | None = None
    """So many trajectories, the newest."""
    size_bytes: int | None = None
    """So many bytes of the log, the newest."""

    @property
    def file_age_s(self) -> float | None:
        """Seconds after which a file is to end, so that little outlives its age; None: by its size alone."""
        return None if self.age_s is None else self.age_s / FILES_KEPT

    def file_bytes(self, most: int, max_disk_bytes: int | None = None) -> int:
        """Bytes at which a file is to end, at most so many: whole files are deleted, and little is to outlive them.
        Below the bound of the disk there is to be more than the file that is written, which cannot be deleted."""
        small = [size for size in (self.size_bytes, max_disk_bytes if self.deletes else None) if size is not None]
        return min(most, max(MIN_FILE_BYTES, min(small) // FILES_KEPT)) if small else most

    @property
    def deletes(self) -> bool:
        """Whether any rule is given."""
        return (self.age_s, self.trajectories, self.size_bytes) != (None, None, None)


KEEP_ALL = RetentionRules()
"""No rule."""


class FileUse(NamedTuple):
    """A file of the log: its number, size, trajectories, and when it was last written (Unix time in seconds)."""

    number: int
    size_bytes: int
    trajectories: int
    written_at: float


def removable_files(files: Sequence[FileUse], retention: RetentionRules, *, now_s: float, needed: int) -> list[int]:
    """Numbers of the files that may be deleted now, oldest first. ``files`` are all files in order, the one that is
    written last; from file ``needed`` on all have to stay."""
    trajectories = sum(file.trajectories for file in files)
    size_bytes = sum(file.size_bytes for file in files)
    gone: list[int] = []
    for file in takewhile(lambda file: file.number < needed, files[:-1]):
        trajectories -= file.trajectories
        size_bytes -= file.size_bytes
        old = retention.age_s is not None and now_s - file.written_at > retention.age_s
        many = retention.trajectories is not None and trajectories >= retention.trajectories
        large = retention.size_bytes is not None and size_bytes >= retention.size_bytes
        if not (old or many or large):
            break
        gone.append(file.number)
    return gone
