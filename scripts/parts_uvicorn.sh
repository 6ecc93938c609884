#!/bin/sh
# Installs the oldest uvicorn that the services support into build/parts/uvicorn-floor, from its own hashed lock. Tests put
# this folder first on the path. Safe to repeat.
#
# * Does nothing if the lock has not changed since the last time.
# * If no package registry can be reached the part is left out; with CI=true that is an error.
set -eu

cd "$(dirname "$0")/.."
lock=requirements/uvicorn-floor.txt
place=build/parts/uvicorn-floor
stamp=$place/.headrace-parts

[ "$(cat "$stamp" 2>/dev/null)" != "$(cksum "$lock")" ] || exit 0

# An account without a writable home keeps uv's cache in the checkout.
if [ -z "${UV_CACHE_DIR:-}" ] && ! mkdir -p "${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/uv" 2>/dev/null; then
    UV_CACHE_DIR=$PWD/build/uv-cache
    export UV_CACHE_DIR
fi
uv=uv
if ! uv --version >/dev/null 2>&1; then
    sh scripts/setup.sh # installs one
    uv=.venv/bin/uv
fi

rm -rf "$place"
if ! "$uv" pip install --quiet --no-deps --require-hashes --only-binary :all: --python-version 3.11 \
    --target "$place" --requirements "$lock"; then
    printf 'parts: uvicorn-floor could not be installed. Is a Python package registry reachable?\n' >&2
    [ "${CI:-}" != true ] || exit 1
    printf 'parts: tests that need it are skipped\n' >&2
    exit 0
fi
cksum "$lock" >"$stamp"
