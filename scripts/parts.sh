#!/bin/sh
# Installs the heavy parts that some tests and examples need. Safe to repeat: what is there is kept.
#
# * What is no Python package: as root on a system with apt it installs that; otherwise it prints the command.
# * Runtimes of sandboxes have the version that the tests run with, where the system is the tests' own, Debian 12.
# * gVisor's runsc, from a newer suite of Debian (parts_gvisor.sh); no root needed.
# * The oldest uvicorn that the services take, for the tests (parts_uvicorn.sh); no root needed.
# * vLLM, torch and TRL, in an environment of their own (parts_vllm.sh); no root needed.
# * Under CI=true a part that cannot be had is an error, because its tests must not be skipped there.
set -eu

cd "$(dirname "$0")/.."

# A package's name for apt, with its version where this is Debian 12. The star is for Debian's own security updates: its
# mirrors keep only the last of them.
pinned() {
    release=$(. /etc/os-release 2>/dev/null && printf '%s' "${ID:-}-${VERSION_ID:-}") || release=
    if [ "$release" = debian-12 ]; then printf ' %s=%s*' "$1" "$2"; else printf ' %s' "$1"; fi
}

system_parts() {
    missing=
    # The browser of the console's tests.
    command -v chromium >/dev/null 2>&1 || missing="$missing chromium"
    # The default runtime of sandboxes.
    command -v bwrap >/dev/null 2>&1 || missing="$missing$(pinned bubblewrap 0.8.0)"
    # Networks that the tests of sandboxes make for themselves.
    command -v ip >/dev/null 2>&1 || missing="$missing iproute2"
    # The daemon of the runtime docker; the tests start one of their own.
    command -v dockerd >/dev/null 2>&1 || missing="$missing$(pinned docker.io 20.10.24)"
    # What reasoning-gym is built with, unless it is installed.
    if ! .venv/bin/python -c 'import reasoning_gym' >/dev/null 2>&1; then
        command -v cc >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
        python=.venv/bin/python
        [ -x "$python" ] || python=${PYTHON:-python3}
        "$python" -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")' >/dev/null 2>&1 ||
            missing="$missing python3-dev"
        rm -f .venv/.headrace-setup # so that the next set-up tries again
    fi

    [ -n "$missing" ] || return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        printf 'parts: installing%s\n' "$missing" >&2
        export DEBIAN_FRONTEND=noninteractive
        apt-get -qq update
        set -f # the stars are for apt
        # shellcheck disable=SC2086  # a list of package names
        apt-get -qq install --yes --no-install-recommends $missing >/dev/null
        return
    fi
    printf 'parts: missing:%s. Install with: sudo apt-get install%s (tests that need a missing part are skipped)\n' \
        "$missing" "$missing" >&2
    [ "${CI:-}" != true ]
}

system_parts
sh scripts/parts_gvisor.sh
sh scripts/parts_uvicorn.sh
sh scripts/parts_vllm.sh
