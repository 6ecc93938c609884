"""Path prefix, media types and headers of the HTTP API."""

API = "/v1"
"""Prefix of every route of the service."""

BATCH_MEDIA_TYPE = "application/vnd.headrace.batch"
ASSET_MEDIA_TYPE = "application/octet-stream"
ASSETS_MEDIA_TYPE = "application/vnd.headrace.assets"
RECORDS_MEDIA_TYPE = "application/vnd.headrace.records"
PROBLEM_MEDIA_TYPE = "application/problem+json"

HEADER_EPOCH = "Headrace-Epoch"
HEADER_GENERATION = "Headrace-Generation"
HEADER_LEASE_S = "Headrace-Lease-Seconds"
HEADER_WAIT_S = "Headrace-Wait-Seconds"
"""Header of every response to a long poll: the granted wait."""

MAX_WAIT_S = 60.0
"""Default of the longest long poll that the server grants; a longer ``wait_s`` is shortened to it."""
