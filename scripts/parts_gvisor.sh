#!/bin/sh
# Installs runsc, the runtime of gVisor, into build/parts/gvisor, from one pinned Debian package. Safe to repeat.
#
# * The package of Debian 12 is too old for newer kernels, so it comes from the next suite. Lists, sources and cache are
#   in a temporary folder, and apt's own state does not change. The mirror and the keyring are those of apt.
# * The package's hash is checked before it is unpacked. None of its scripts run, and root is not needed.
# * On other architectures than amd64, or without apt or a Debian mirror, nothing is installed: the reason is printed,
#   and is an error with CI=true.
set -eu

cd "$(dirname "$0")/.."

SUITE=trixie
VERSION=0.0~20240729.0-4+b7
SHA256=3c25a5130dfac2f71237d5baad56ac86a255de87a0400f11b36a555156dc325a
FOLDER=build/parts/gvisor
MARK="$FOLDER/.headrace-parts"

# Ends this script with the reason why the part is not installed; with CI=true this is an error.
leave_out() {
    printf 'parts: gVisor is not installed: %s\n' "$1" >&2
    [ "${CI:-}" != true ] || exit 1
    printf 'parts: tests that need gVisor are skipped\n' >&2
    exit 0
}

# Prints the URI and the keyring of apt's first Debian source.
sources() {
    cat /etc/apt/sources.list.d/*.sources 2>/dev/null |
        awk '/^URIs:/ { uri = $2 } /^Signed-By:/ { keyring = $2 }
             uri && keyring && keyring ~ /debian-archive/ { print uri, keyring; exit }
             /^$/ { uri = keyring = "" }'
}

[ "$(cat "$MARK" 2>/dev/null)" != "$VERSION" ] || exit 0
command -v apt-get >/dev/null 2>&1 && command -v dpkg-deb >/dev/null 2>&1 || leave_out "this system has no apt"
[ "$(dpkg --print-architecture)" = amd64 ] || leave_out "the pinned package is for amd64"
source=$(sources)
[ -n "$source" ] || leave_out "apt has no Debian mirror with a keyring"

started=$(date +%s)
private=$(mktemp -d)
trap 'rm -rf "$private"' EXIT
mkdir -p "$private/lists/partial" "$private/cache/archives/partial"
printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n' \
    "${source% *}" "$SUITE" "${source#* }" >"$private/newer.sources"
: >"$private/status"
set -- -qq -o "Dir::Etc::SourceList=/dev/null" -o "Dir::Etc::SourceParts=$private" \
    -o "Dir::State::Lists=$private/lists" -o "Dir::State::Status=$private/status" -o "Dir::Cache=$private/cache" \
    -o APT::Sandbox::User=root -o Acquire::Languages=none
apt-get "$@" update
(cd "$private" && apt-get "$@" download "runsc=$VERSION")
package=$(echo "$private"/runsc_*.deb)
printf '%s  %s\n' "$SHA256" "$package" | sha256sum --check --quiet
mkdir -p "$FOLDER"
dpkg-deb -x "$package" "$FOLDER"
echo "$VERSION" >"$MARK"
printf 'parts: gVisor (runsc %s): %s kB in %s, %s s\n' \
    "$VERSION" "$(du -sk "$FOLDER" | cut -f1)" "$FOLDER" "$(($(date +%s) - started))" >&2
