#!/bin/sh
# Writes requirements/*.txt from pyproject.toml: every package pinned and hashed, for Python 3.11 to 3.14 on any
# platform, without the address of a registry. Pins that still fit are kept; `sh scripts/lock.sh --upgrade` updates them.
# uvicorn-floor.txt is the oldest uvicorn that the services support; tests run the services with it and with the locked
# one. vllm.txt has its own inputs beside pyproject.toml, and is locked for one Python on one platform: the metadata of
# intel-openmp's wheels differ between platforms, and a lock for all platforms would use the wrong one.
set -eu

cd "$(dirname "$0")/.."
uv=$(command -v uv || printf '%s' .venv/bin/uv)

# Arguments: output, input, options. The pins of all.txt constrain the others except vllm and uvicorn-floor.
compile() {
    out=requirements/$1.txt
    shift
    "$uv" pip compile --quiet --python-version 3.11 --generate-hashes \
        --no-header --no-annotate --no-emit-index-url --no-emit-find-links --output-file "$out" "$@"
    printf 'lock: %s\n' "$out" >&2
}

compile all pyproject.toml --universal --extra all "$@"
compile base pyproject.toml --universal --constraint requirements/all.txt
compile reasoning-gym pyproject.toml --universal --extra reasoning-gym --constraint requirements/all.txt
# Development without reasoning-gym, the only package that needs a C compiler.
compile dev pyproject.toml --universal --extra worker --extra docker --extra wasm --extra renderers --extra math --extra server --extra plots \
    --extra export --group dev --constraint requirements/all.txt "$@"
compile vllm pyproject.toml requirements/vllm.in --override requirements/vllm-overrides.in --extra async --only-binary :all: \
    --python-platform x86_64-manylinux_2_31 "$@"
sed -n 's/^  "\(uvicorn>=.*\)",$/\1/p' pyproject.toml | sort -u |
    compile uvicorn-floor - --universal --no-deps --resolution lowest-direct --upgrade
