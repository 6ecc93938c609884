#!/bin/sh
# Makes .venv from the hashed lock and installs the project into it, editable.
#
# * Does nothing, quickly, when lock, project file and interpreter are those of the last time.
# * Of several interpreters takes the first whose code is no shared library, because those are faster, and says so. It
#   must serve as well: make a venv, and have the headers that reasoning-gym is built with.
# * PYTHON=/path/to/python decides alone, and a .venv of another interpreter is made anew. Without PYTHON a .venv that
#   works keeps its interpreter.
# * Every package comes from requirements/ and must match a hash there.
# * Only reasoning-gym needs a C compiler (a dependency of it ships no wheels); without one it is left out, and said so.
#   Under CI=true it must be there.
# * Compiles what it installed, and the project: with PYTHONDONTWRITEBYTECODE every process would do that anew.
# * Needs Python 3.11 to 3.14 and network access to a Python package registry; uv is used where it exists and is
#   fetched into .venv where not. What is missing is said in one line.
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

# Whether an interpreter's code is in its program. In a shared library it is slower.
static() {
    "$1" -c 'import sys; sys.exit("libpython" in open("/proc/self/maps").read())' >/dev/null 2>&1
}

# Whether nothing is lost with an interpreter that nobody asked for.
complete() {
    "$1" -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")' >/dev/null 2>&1 || return 1
    uv --version >/dev/null 2>&1 || "$1" -c 'import ensurepip, venv' >/dev/null 2>&1
}

# The interpreter to take; prints nothing where the project supports none.
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
            printf 'setup: taking %s, a faster build than %s; make setup PYTHON=%s takes that one\n' \
                "$candidate" "$found" "$found" >&2
            found=$candidate
            break
        fi
    done
    printf '%s' "$found"
}

binary() {
    "$1" -c 'import os, sys; print(os.path.realpath(sys.executable))' 2>/dev/null
}

# Whether .venv works and is of the interpreter that PYTHON names, if it names one.
kept() {
    supported "$venv/bin/python" || return 1
    [ -z "${PYTHON:-}" ] || [ "$(binary "$PYTHON")" = "$(binary "$venv/bin/python")" ]
}

# A venv holds absolute paths, so a moved checkout needs a new one.
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
        [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is no Python 3.11 to 3.14."
        die "No Python 3.11 to 3.14 found. Install one (Debian: apt-get install python3 python3-venv), or name it: make setup PYTHON=/path/to/python3.12"
    fi
fi

printf 'setup: installing the locked packages into %s (a minute or two the first time)\n' "$venv" >&2
rm -f "$stamp"
if [ -z "$python" ]; then
    : # the environment of an older lock; the installs below bring it up to date
elif [ -n "$uv" ] && [ "$uv" != "$venv/bin/uv" ]; then
    rm -rf "$venv"
    "$uv" venv --quiet --python "$python" "$venv" || die "uv could not make $venv with $python."
else
    rm -rf "$venv"
    "$python" -m venv "$venv" >/dev/null 2>&1 ||
        die "$python cannot make a virtual environment. Install its venv module (Debian: apt-get install python3-venv) or uv."
    # The lock's own entry for uv, hashes included.
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
    printf 'setup: without the rg: environments; they need a C compiler and the headers of Python: make parts\n' >&2
fi
# Some packages hold files that are no Python of this version; those stay as they are.
"$venv/bin/python" -W ignore -m compileall -qq -j 0 \
    "$venv/lib" sdk sandbox workers orchestrator tests benchmarks examples || :
fingerprint >"$stamp"
