#!/bin/sh
# Writes requirements/*.txt from pyproject.toml: every package pinned and hashed, for Python 3.11 to 3.14 on any
# platform, with no address of a registry inside. Pins that still fit are kept; `sh scripts/lock.sh --upgrade` moves them.
set -eu

cd "$(dirname "$0")/.."
uv=$(command -v uv || printf '%s' .venv/bin/uv)

# output, then what it covers. Pins of all.txt bind the others, so that the four agree.
compile() {
    out=requirements/$1.txt
    shift
    "$uv" pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
        --no-header --no-annotate --no-emit-index-url --no-emit-find-links --output-file "$out" "$@"
    printf 'lock: %s\n' "$out" >&2
}

compile all --extra all "$@"
compile base --constraint requirements/all.txt
compile reasoning-gym --extra reasoning-gym --constraint requirements/all.txt
# Development without reasoning-gym: that one alone needs a C compiler.
compile dev --extra worker --extra server --extra plots --extra export --group dev --constraint requirements/all.txt "$@"
