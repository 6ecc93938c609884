"""The route table as OpenAPI 3.1, generated from the types of requests and responses.

* The errors that follow from a route's roles, body, query and path are derived; the route lists only its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from headrace import errors
from headrace.errors import HeadraceError
from headrace.runspec import RunSpec
from headrace.wire.messages import PROBLEM_MEDIA_TYPE, AssetHead, SubmissionHead
from headrace_orchestrator.api.pages import is_page_path
from headrace_orchestrator.api.route import Route

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)\}")

_TOKEN = (
    "A token of the service's token file; its role must be one of the operation's, or admin. Without a token file no "
    "token is needed. A browser that signed in at /sign-in sends a cookie instead."
)

_BINARY = {"type": "string", "format": "binary"}

_EVENT = {
    "type": "object",
    "description": "One event of the stream.",
    "required": ["data"],
    "properties": {"data": {"type": "string", "description": "HTML of the console's content."}},
}

PROBLEM: dict[str, Any] = {
    "type": "object",
    "description": "RFC 9457. code is stable; hint says what to do.",
    "required": ["type", "title", "status", "code", "detail", "hint"],
    "properties": {
        **{name: {"type": "string"} for name in ("type", "title", "code", "detail", "hint")},
        "status": {"type": "integer"},
    },
}


def document(routes: Sequence[Route], version: str) -> dict[str, Any]:
    """Build the whole document."""
    kinds = [kind for route in routes for kind in (route.request, route.response) if _is_msgspec(kind)]
    kinds += [AssetHead, SubmissionHead]  # parts of bodies that are not JSON
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema_of = dict(zip(map(repr, kinds), schemas, strict=True))
    run_spec = RunSpec.model_json_schema(ref_template="#/components/schemas/{model}")
    components |= run_spec.pop("$defs", {}) | {"RunSpec": run_spec, "Problem": PROBLEM}
    schema_of[repr(RunSpec)] = {"$ref": _REF.format(name="RunSpec")}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": _TOKEN}},
        },
    }


def _is_msgspec(kind: Any) -> bool:
    return kind is not None and kind is not RunSpec and not isinstance(kind, str)


def _content(kind: Any, schema_of: dict[str, Any]) -> dict[str, Any]:
    if isinstance(kind, str):
        return {kind: {"schema": _EVENT if kind == "text/event-stream" else _BINARY}}
    return {"application/json": {"schema": schema_of[repr(kind)]}}


def _operation(route: Route, schema_of: dict[str, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {str(route.status): {"description": "Done."}}
    if route.response is not None:
        responses[str(route.status)]["content"] = _content(route.response, schema_of)
    for error in dict.fromkeys((*route.errors, *_derived_errors(route))):
        response = responses.setdefault(str(error.status), _problem_response())
        response["description"] = f"{response['description']} {_title(error)}".strip()
    for status in ("401", "403"):
        if status in responses and (is_page_path(route.path) or route.response == "text/html"):
            responses[status]["content"]["text/html"] = {"schema": _BINARY}  # the page to sign in
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": route.name or route.handler.__name__,
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in _PARAMETER.findall(route.path)
            ),
            *(
                {"name": field.name, "in": "query", "description": field.text, "schema": {"type": field.kind}}
                for field in route.query
            ),
        ],
        "responses": dict(sorted(responses.items())),
        "security": [{"token": sorted(route.roles)}] if route.roles else [],
    }
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.request, schema_of)}
    return operation


def _derived_errors(route: Route) -> Iterator[type[HeadraceError]]:
    """The errors that any route may answer with its roles, its body, its query and its method."""
    if route.roles:
        yield errors.Unauthorized
        yield errors.Forbidden
        yield errors.Unavailable
    yield errors.ForeignOrigin
    if _is_msgspec(route.request) or route.request is RunSpec or route.query:
        yield errors.InvalidRequest
    if route.request is not None:
        yield errors.UnsupportedMediaType
    if route.roles and route.method != "GET":
        yield errors.StoreError
    yield errors.RequestTooLarge
    yield errors.RequestHeadTooLarge
    yield errors.InternalError


def _problem_response() -> dict[str, Any]:
    schema = {"$ref": _REF.format(name="Problem")}
    return {"description": "", "content": {PROBLEM_MEDIA_TYPE: {"schema": schema}}}


def _title(error: type[HeadraceError]) -> str:
    return f"{error.code}: {error.title}."
