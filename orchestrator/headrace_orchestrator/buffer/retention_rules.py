"""The rules of retention: old files of the log may be deleted, oldest first and whole, as soon as one rule allows it.

* Nothing is deleted unless a rule allows it; each rule counts alone.
* A file that holds a record in use, or that a start needs, stays; and so do all files behind it.
* Files are small in comparison with the data that is kept, so that little is kept longer than the rules require.
* By age: a file goes when its newest record is too old. By count and by bytes: when the rest still reaches the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

FILES_KEPT = 4
"""Minimum number of files that hold the kept data, so that at most a quarter more than that is stored."""

MIN_FILE_BYTES = 1 << 20
"""Minimum size of a file, even if little data is kept: each file has a head."""


@dataclass(frozen=True, kw_only=True)
class RetentionRules:
    """The minimum of data to keep. A rule that is None deletes nothing."""

    age_s: float | None = None
    """Age in seconds up to which records are kept."""
    trajectories: int | None = None
    """Number of the newest trajectories to keep."""
    size_bytes: int | None = None
    """Bytes of the newest part of the log to keep."""

    @property
    def file_age_s(self) -> float | None:
        """Seconds after which a file is sealed, so that little outlives its age; None: size alone decides."""
        return None if self.age_s is None else self.age_s / FILES_KEPT

    def file_bytes(self, most: int, max_disk_bytes: int | None = None) -> int:
        """Bytes at which a file is sealed, at most ``most``: files are deleted whole, and little data should outlive
        the rules. Within the limit of the disk more than the current file must fit, because that is never deleted."""
        small = [size for size in (self.size_bytes, max_disk_bytes if self.deletes else None) if size is not None]
        return min(most, max(MIN_FILE_BYTES, min(small) // FILES_KEPT)) if small else most

    @property
    def deletes(self) -> bool:
        """True if any rule is given."""
        return (self.age_s, self.trajectories, self.size_bytes) != (None, None, None)


KEEP_ALL = RetentionRules()
"""Rules that delete nothing."""


class FileUse(NamedTuple):
    """A file of the log: its number, size, trajectories, and when it was last written (Unix time in seconds)."""

    number: int
    size_bytes: int
    trajectories: int
    written_at: float


def removable_files(files: Sequence[FileUse], rules: RetentionRules, *, now_s: float, needed: int) -> list[int]:
    """Numbers of the files that may be deleted now, oldest first. ``files`` are all files in order, the current one
    last; the files from number ``needed`` on have to stay."""
    trajectories = sum(file.trajectories for file in files)
    size_bytes = sum(file.size_bytes for file in files)
    removable: list[int] = []
    for file in takewhile(lambda file: file.number < needed, files[:-1]):
        trajectories -= file.trajectories
        size_bytes -= file.size_bytes
        too_old = rules.age_s is not None and now_s - file.written_at > rules.age_s
        too_many = rules.trajectories is not None and trajectories >= rules.trajectories
        too_large = rules.size_bytes is not None and size_bytes >= rules.size_bytes
        if not (too_old or too_many or too_large):
            break
        removable.append(file.number)
    return removable
