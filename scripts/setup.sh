#!/bin/sh
# Makes .venv from the hashed lock and installs the project into it, editable.
#
# * Does nothing if the locks, the project file and the interpreter have not changed since the last time.
# * Prefers an interpreter that is not built as a shared library, because it is faster, and says so. It must be able to
#   make a venv, and have the headers for building reasoning-gym.
# * PYTHON=/path/to/python sets the interpreter; a .venv of another one is replaced. Without PYTHON a working .venv
#   keeps its interpreter.
# * Every package is pinned in requirements/ and must match a hash there.
# * Only reasoning-gym needs a C compiler (a dependency has no wheels); without one it is left out with a message. With
#   CI=true that is an error.
# * Compiles the installed packages and the project: with PYTHONDONTWRITEBYTECODE every process would compile them again.
# * Needs Python 3.11 to 3.14 and network access to a Python package registry. uv is installed into .venv if the system
#   has none. A missing requirement is reported in one line.
set -eu

cd "$(dirname "$0")/.."
lock=requirements/dev.txt
venv=.venv
stamp=$venv/.headrace-setup

die() {
    printf 'setup: %s\n' "$1" >&2
    exit 1
}

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1
}

# True if an interpreter's code is in its program: in a shared library it is slower.
static() {
    "$1" -c 'import sys; sys.exit("libpython" in open("/proc/self/maps").read())' >/dev/null 2>&1
}

# True if an interpreter can make a venv and build reasoning-gym.
complete() {
    "$1" -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")' >/dev/null 2>&1 || return 1
    uv --version >/dev/null 2>&1 || "$1" -c 'import ensurepip, venv' >/dev/null 2>&1
}

# Prints the interpreter to use, or nothing if no supported one is found.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        ! supported "$PYTHON" || printf '%s\n' "$PYTHON"
        return
    fi
    found=
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3 /usr/local/bin/python3; do
        supported "$candidate" || continue
        if [ -z "$found" ]; then
            found=$candidate
            ! static "$found" || break
        elif static "$candidate" && complete "$candidate"; then
            printf 'setup: using %s, a faster build than %s; to use %s instead: make setup PYTHON=%s\n' \
                "$candidate" "$found" "$found" "$found" >&2
            found=$candidate
            break
        fi
    done
    printf '%s' "$found"
}

binary() {
    "$1" -c 'import os, sys; print(os.path.realpath(sys.executable))' 2>/dev/null
}

# True if .venv works and has the interpreter that PYTHON names, if set.
kept() {
    supported "$venv/bin/python" || return 1
    [ -z "${PYTHON:-}" ] || [ "$(binary "$PYTHON")" = "$(binary "$venv/bin/python")" ]
}

# A venv contains absolute paths, so a moved checkout needs a new one.
fingerprint() {
    pwd
    cksum requirements/*.txt pyproject.toml
}

if [ -f "$stamp" ] && [ "$(fingerprint)" = "$(cat "$stamp")" ] && kept; then
    exit 0
fi

# An account without a writable home keeps uv's cache in the checkout.
if [ -z "${UV_CACHE_DIR:-}" ] && ! mkdir -p "${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/uv" 2>/dev/null; then
    UV_CACHE_DIR=$PWD/build/uv-cache
    export UV_CACHE_DIR
fi

uv=
for candidate in uv "$venv/bin/uv"; do
    if "$candidate" --version >/dev/null 2>&1; then
        uv=$candidate
        break
    fi
done

python=
if [ -z "$uv" ] || ! kept || ! grep -q "$PWD/$venv" "$venv/bin/activate"; then
    python=$(find_python)
    if [ -z "$python" ]; then
        [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not a Python 3.11 to 3.14."
        die "No Python 3.11 to 3.14 found. Install one (Debian: apt-get install python3 python3-venv), or give its path: make setup PYTHON=/path/to/python3.12"
    fi
fi

printf 'setup: installing the locked packages into %s (a minute or two the first time)\n' "$venv" >&2
rm -f "$stamp"
if [ -z "$python" ]; then
    : # an environment of an older lock, which the installs below update
elif [ -n "$uv" ] && [ "$uv" != "$venv/bin/uv" ]; then
    rm -rf "$venv"
    "$uv" venv --quiet --python "$python" "$venv" || die "uv could not make $venv with $python."
else
    rm -rf "$venv"
    "$python" -m venv "$venv" >/dev/null 2>&1 ||
        die "$python cannot make a virtual environment. Install its venv module (Debian: apt-get install python3-venv) or uv."
    # The lock's entry for uv, with its hashes.
    awk '/^uv==/ { take = 1 } take { print } take && !/\\$/ { exit }' "$lock" >"$venv/uv.txt"
    "$venv/bin/python" -m pip install --quiet --no-cache-dir --require-hashes --requirement "$venv/uv.txt" ||
        die "pip could not fetch uv. Is a Python package registry reachable?"
    uv=$venv/bin/uv
fi
"$uv" pip install --quiet --python "$venv/bin/python" --only-binary :all: --require-hashes --requirement "$lock" ||
    die "The locked packages could not be installed. Is a Python package registry reachable?"
"$uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation --editable . ||
    die "The project itself could not be installed into $venv."
if ! reason=$("$uv" pip install --quiet --python "$venv/bin/python" --require-hashes \
    --requirement requirements/reasoning-gym.txt 2>&1); then
    [ "${CI:-}" != true ] || die "reasoning-gym could not be installed: $reason"
    printf 'setup: the rg: environments are left out; they need a C compiler and the headers of Python: make parts\n' >&2
fi
# Some packages contain files for other Python versions; those are not compiled.
"$venv/bin/python" -W ignore -m compileall -qq -j 0 \
    "$venv/lib" sdk sandbox workers orchestrator tests benchmarks examples || :
fingerprint >"$stamp"
