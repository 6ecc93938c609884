#!/bin/sh
# Installs the large parts that some tests and examples need. Safe to repeat: installed parts are kept.
#
# * System packages: installed with apt if the user is root; otherwise the command is printed.
# * Sandbox runtimes: on Debian 12, the system of the tests, in the versions that the tests use.
# * gVisor's runsc, from a newer suite of Debian (parts_gvisor.sh); root is not needed.
# * The oldest uvicorn that the services support, for the tests (parts_uvicorn.sh); root is not needed.
# * vLLM, torch and TRL, in a separate environment (parts_vllm.sh); root is not needed.
# * With CI=true a part that cannot be installed is an error, because its tests must not be skipped there.
set -eu

cd "$(dirname "$0")/.."

# Prints a package name for apt, on Debian 12 with its version. The star matches security updates, of which Debian's
# mirrors keep only the latest.
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
    # Network namespaces in the tests of sandboxes.
    command -v ip >/dev/null 2>&1 || missing="$missing iproute2"
    # The daemon of the docker runtime; the tests start their own.
    command -v dockerd >/dev/null 2>&1 || missing="$missing$(pinned docker.io 20.10.24)"
    # The compiler and headers for building reasoning-gym, unless that is installed.
    if ! .venv/bin/python -c 'import reasoning_gym' >/dev/null 2>&1; then
        command -v cc >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
        python=.venv/bin/python
        [ -x "$python" ] || python=${PYTHON:-python3}
        "$python" -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")' >/dev/null 2>&1 ||
            missing="$missing python3-dev"
        rm -f .venv/.headrace-setup # so that the next setup tries again
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
    printf 'parts: missing:%s. Install them with: sudo apt-get install%s (tests that need a missing part are skipped)\n' \
        "$missing" "$missing" >&2
    [ "${CI:-}" != true ]
}

system_parts
sh scripts/parts_gvisor.sh
sh scripts/parts_uvicorn.sh
sh scripts/parts_vllm.sh
