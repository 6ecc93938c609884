"""``headrace run``: create a run from a file or from flags, and print the schema of a run."""

from __future__ import annotations

import json
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.errors import InvalidRequest
from headrace.runspec import RunSpec, parse_run_spec
from headrace_orchestrator.cli import runs, top
from headrace_orchestrator.cli.output import connect, emit, json_option, note, service_options, shared, table

_PATH_SUFFIXES: dict[Any, str] = {list: "[]", types.UnionType: "[]", dict: ".*"}
"""Suffix of a field's path before its inner fields, by the field's type; the only unions are with None."""


class Field(NamedTuple):
    """A line of ``--schema``. ``name`` is the path that ``--set`` takes."""

    name: str
    type: str
    default: str
    meaning: str


@click.command(short_help="Create a run from a file.")
@click.argument("file", required=False, type=click.Path(path_type=Path, allow_dash=True))
@click.option("--name", help="Name of the run; overrides the name in the file.")
@click.option("--environment", "environments", multiple=True, help="An environment of the mixture; may be repeated.")
@click.option(
    "--set", "assignments", multiple=True, metavar="FIELD=VALUE", help="Any field, as in estimator.gamma=0.9."
)
@click.option("--exist-ok", is_flag=True, help="Accept an existing run of the same name and spec.")
@click.option("--watch", is_flag=True, help="Show the run until it is finished.")
@click.option("--schema", is_flag=True, help="Print every field with its type, default and meaning, and stop.")
@service_options
@json_option
def run(
    file: Path | None,
    name: str | None,
    environments: tuple[str, ...],
    assignments: tuple[str, ...],
    exist_ok: bool,
    watch: bool,
    schema: bool,
    url: str | None,
    token: str | None,
) -> None:
    """Create a run from FILE (JSON or TOML; `-` reads JSON from standard input), from flags, or from both.

    \b
    Examples:
      headrace run guess.json --watch
      headrace run --name guess --environment game:GuessTheNumber-v0-hard --set batch_size=64
      headrace run --schema
    """
    if schema:
        _print_schema()
        return
    if file is None and name is None:
        raise click.UsageError("Give a FILE or --name. `headrace run --schema` prints every field.")
    spec = parse_run_spec(_merged_spec(file, name, environments, assignments))
    with connect(url, token) as client:
        status = client.create_run(spec, exist_ok=exist_ok)
        if watch:
            top.watch(client, run=status.name)
            status = client.run(status.name)
    if shared().json:
        emit(status)
    else:
        table(runs.COLUMNS, [runs.row(status)])
        address = repr(url) if url else ""
        note(f"Learners pull it with: for batch in headrace.Client({address}).batches({status.name!r})")


def _merged_spec(
    file: Path | None, name: str | None, environments: tuple[str, ...], assignments: tuple[str, ...]
) -> dict[str, Any]:
    """Merge the spec of the file with the flags, which override it."""
    spec = _read_file(file) if file is not None else {}
    if name is not None:
        spec["name"] = name
    if environments:
        spec["environments"] = [{"id": environment} for environment in environments]
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not all(path.split(".")):
            raise click.UsageError(f"--set {assignment}: it must be FIELD=VALUE.")
        _assign(spec, path.split("."), _value(text))
    return spec


def _read_file(file: Path) -> dict[str, Any]:
    try:
        with click.open_file(str(file), "rb") as stream:
            text = stream.read().decode()
        spec = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}.", hint="Check the path.") from error
    except (ValueError, UnicodeDecodeError) as error:
        kind = "TOML" if file.suffix == ".toml" else "JSON"
        raise InvalidRequest(f"{file} is not {kind}: {error}.", hint="Files end in .json or .toml.") from error
    if not isinstance(spec, dict):
        raise InvalidRequest(f"{file} does not contain an object.", hint="`headrace run --schema` prints every field.")
    return spec


def _value(text: str) -> Any:
    """Parse a value as JSON (numbers, lists, true), or return the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _assign(target: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        inner = target.setdefault(part, {})
        if not isinstance(inner, dict):
            raise click.UsageError(f"--set {'.'.join(path)}: {part} is not an object.")
        target = inner
    target[path[-1]] = value


def _print_schema() -> None:
    if shared().json:
        emit(RunSpec.model_json_schema())
        return
    table(Field._fields, [tuple(field) for field in fields(RunSpec)])


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[Field]:
    """List every field of a spec, nested ones after their parent."""
    for name, info in model.model_fields.items():
        meaning = " ".join((info.description or "").split())
        yield Field(prefix + name, _type(info.annotation), _default(info), meaning)
        for inner in _models(info.annotation):
            yield from fields(inner, f"{prefix}{name}{_PATH_SUFFIXES.get(typing.get_origin(info.annotation), '')}.")


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in _models(argument)]


def _type(annotation: Any) -> str:
    """The type without its bounds, which the JSON schema has."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return " or ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_type, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type, arguments))}]"
    if annotation is type(None):
        return "None"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).removeprefix("typing.")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "(required)"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "(see below)"
    return json.dumps(value)
