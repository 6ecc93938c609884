#!/bin/sh
# Installs the heavy parts that some tests need and that are no Python packages. Safe to repeat: what is there is kept.
#
# * As root on a system with apt it installs them; otherwise it prints the command.
# * Under CI=true a part that cannot be had is an error, because its tests must not be skipped there.
set -eu

cd "$(dirname "$0")/.."
missing=
# The browser of the console's tests.
command -v chromium >/dev/null 2>&1 || missing="$missing chromium"
# What reasoning-gym is built with, unless it is installed.
if ! .venv/bin/python -c 'import reasoning_gym' >/dev/null 2>&1; then
    command -v cc >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
    python3 -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
        >/dev/null 2>&1 || missing="$missing python3-dev"
    rm -f .venv/.headrace-setup # so that the next set-up tries again
fi

[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    printf 'parts: installing%s\n' "$missing" >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update
    # shellcheck disable=SC2086  # a list of package names
    apt-get -qq install --yes --no-install-recommends $missing >/dev/null
    exit 0
fi
printf 'parts: missing:%s. Install with: sudo apt-get install%s (tests that need a missing part are skipped)\n' \
    "$missing" "$missing" >&2
[ "${CI:-}" != true ]
