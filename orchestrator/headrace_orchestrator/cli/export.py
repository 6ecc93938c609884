"""``headrace export``: stored trajectories in the formats of other tools.

* The folder appears only when complete; an export that fails or matches nothing leaves no folder.
* A damaged record is named and left out; with ``--strict`` it ends the export.
* Assets of the exported trajectories are exported with them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any, get_args

import click

import headrace
from headrace.errors import CorruptAsset, InvalidRequest, UnknownAsset, UnknownRun
from headrace.offline import Reader, TrajectoryFilter
from headrace.store.asset_files import FOLDER, asset_path
from headrace.store.tables import as_json, table_schema, tables
from headrace.trajectory import Status, Trajectory, Version
from headrace_orchestrator.cli.output import emit, json_option, note, shared
from headrace_orchestrator.cli.progress import progress

FORMATS = ("parquet", "jsonl", "dataset")

SHARD_BYTES = 512 << 20
"""Approximate size of an exported file before compression; loaders read files in parallel."""

CARD = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
tags:
- reinforcement-learning
- headrace
---

# Trajectories

{count} trajectories of {runs}, exported with Headrace {version}. One row is one episode: its messages, and its segments
with token ids, which of them the policy sampled, their logprobs, and the reward of each turn.

```python
from datasets import load_dataset

trajectories = load_dataset("path/to/this/folder", split="train")
```
"""


def _version(ctx: click.Context, param: click.Parameter, value: str | None) -> Version | None:
    try:
        return None if value is None else Version.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


@click.command(short_help="Write stored trajectories as Parquet, JSON lines or a dataset.")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@click.option("--format", "kind", type=click.Choice(FORMATS), default="parquet", show_default=True)
@click.option("--run", help="Only trajectories of this run.")
@click.option("--environment", help="Only trajectories of this environment.")
@click.option("--status", type=click.Choice(get_args(Status)), help="Only trajectories with this status.")
@click.option("--evaluation", help="Only trajectories of this evaluation; '' excludes evaluations.")
@click.option("--tag", "tags", multiple=True, help="Only trajectories with this tag on the task; may be repeated.")
@click.option("--low", callback=_version, help="Only trajectories with a row of this version or a later one.")
@click.option("--high", callback=_version, help="Only trajectories with a row of this version or an earlier one.")
@click.option("--strict", is_flag=True, help="End at a damaged record instead of leaving it out.")
@json_option
def export(directory: Path, destination: Path, kind: str, strict: bool, **criteria: Any) -> None:
    """Write the trajectories of the data directory DIR into a new folder DEST.

    The service may be running. `parquet` writes trajectories-*.parquet, `jsonl` trajectories-*.jsonl with every field
    of each record, `dataset` a folder that `datasets.load_dataset(DEST)` of Hugging Face reads. One row is one
    trajectory. Images and large arrays that they refer to are copied to DEST/assets.

    \b
    Examples:
      headrace export headrace-data out --run guess --status finished
      headrace export headrace-data out --format dataset --low 0.10
    """
    if kind != "jsonl":
        table_schema()  # raises for a missing package before anything is read
    if destination.resolve().is_relative_to(directory.resolve()):
        raise InvalidRequest(f"{destination} is inside of the data directory.", hint="Choose a folder elsewhere.")
    with progress("Exporting") as on_progress, fresh_folder(destination) as folder:
        data = headrace.open(directory, strict=strict, on_progress=on_progress)
        counter = _TrajectoryCounter(data.matching(TrajectoryFilter(**criteria)))
        files = _write(kind, folder, counter)
        failed_assets = _copy_assets(data, folder, counter.assets)
        if not counter.count and TrajectoryFilter(**criteria) != TrajectoryFilter():
            _require_run(data, directory, criteria["run"])
            shutil.rmtree(folder)
            files = []
    for name, problem in failed_assets.items():
        note(f"Left out: asset {name}: {problem}")
    for damage in data.damaged:
        note(f"Left out: {damage.file} at offset {damage.offset}, {damage.size_bytes} bytes: {damage.problem}.")
    if shared().json:
        emit(
            {
                "trajectories": counter.count,
                "files": files,
                "assets": len(counter.assets) - len(failed_assets),
                "damaged": [damage._asdict() for damage in data.damaged],
                "damaged_assets": failed_assets,
            }
        )
    elif files:
        note(f"{counter.count} trajectories in {len(files)} file{'s' * (len(files) > 1)} in {destination}.")
    if not files:
        note("No trajectory matches; nothing was written.")


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """Make a folder that appears at ``path`` after the block, unless the block raises or deletes it. Raises
    InvalidRequest for an existing one."""
    if path.exists():
        raise InvalidRequest(f"{path} already exists.", hint="Choose a new folder, or delete this one first.")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an earlier export that was killed
    partial.mkdir()
    try:
        yield partial
        if partial.exists():
            partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _require_run(data: Reader, directory: Path, run: str | None) -> None:
    names = [known.name for known in data.runs()]
    if run is not None and run not in names:
        hint = f"Runs of {directory}: {', '.join(names) or 'none'}."
        raise UnknownRun(f"The run {run!r} does not exist; nothing was written.", hint=hint)


class _TrajectoryCounter:
    """An iterator over trajectories that counts them, their runs and their assets."""

    def __init__(self, trajectories: Iterable[Trajectory]) -> None:
        self._trajectories = trajectories
        self.count = 0
        self.runs: dict[str, None] = {}
        self.assets: dict[str, None] = {}

    def __iter__(self) -> Iterator[Trajectory]:
        for trajectory in self._trajectories:
            self.count += 1
            self.runs[trajectory.run] = None
            self.assets |= dict.fromkeys(asset.name for asset in trajectory.assets)
            yield trajectory


def _write(kind: str, folder: Path, trajectories: _TrajectoryCounter) -> list[str]:
    """Write the files, and return their names."""
    if kind == "jsonl":
        return _write_lines(folder, trajectories)
    if kind == "parquet":
        return _write_parquet(folder, "trajectories", trajectories)
    (folder / "data").mkdir()
    files = _write_parquet(folder / "data", "train", trajectories)
    card = CARD.format(
        count=trajectories.count, runs=", ".join(trajectories.runs) or "no run", version=installed("headrace")
    )
    (folder / "README.md").write_text(card)
    return [f"data/{name}" for name in files]


def _copy_assets(data: Reader, folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Copy assets; returns the errors of those that cannot be copied."""
    failed_assets: dict[str, str] = {}
    for name in names:
        try:
            content = data.asset(name)
        except (UnknownAsset, CorruptAsset) as error:
            failed_assets[name] = error.detail
            if data.strict:
                raise
            continue
        path = asset_path(folder / FOLDER, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return failed_assets


def _write_lines(folder: Path, trajectories: Iterable[Trajectory]) -> list[str]:
    files: list[str] = []
    lines = iter(trajectories)
    more = True
    while more:
        files.append(f"trajectories-{len(files):05d}.jsonl")
        more = False
        with (folder / files[-1]).open("wb") as stream:
            for trajectory in lines:
                stream.write(as_json(trajectory) + b"\n")
                if stream.tell() >= SHARD_BYTES:
                    more = True
                    break
    return files


def _write_parquet(folder: Path, stem: str, trajectories: Iterable[Trajectory]) -> list[str]:
    from pyarrow import parquet

    files: list[str] = []
    parts, more = tables(trajectories), True
    while more:
        files.append(f"{stem}-{len(files):05d}.parquet")
        more, size = False, 0
        with parquet.ParquetWriter(folder / files[-1], table_schema(), compression="zstd") as writer:
            for table in parts:
                writer.write_table(table)
                size += table.nbytes
                if size >= SHARD_BYTES:
                    more = True
                    break
    return files
