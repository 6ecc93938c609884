#!/bin/sh
# Makes build/parts/vllm: an environment with vLLM for CPUs, torch, TRL and Headrace, from its own hashed lock.
#
# * Does nothing if the lock, the project file and the path have not changed since the last time.
# * Prints size and duration, and checks the free disk space, before it downloads anything.
# * Root is not needed. Needs Python 3.11 (this vLLM supports none newer) on Linux x86-64; otherwise it prints the reason
#   and leaves the part out. With CI=true that is an error, because its tests must not be skipped there.
set -eu

cd "$(dirname "$0")/.."
lock=requirements/vllm.txt
place=build/parts/vllm
stamp=$place/.headrace-parts
log=build/parts/vllm.log
size_gb=6

# Ends this script with the reason why the part is not installed; with CI=true this is an error.
leave_out() {
    printf 'parts: vLLM is not installed: %s\n' "$1" >&2
    [ "${CI:-}" != true ] || exit 1
    printf 'parts: tests and examples that need vLLM or torch are skipped\n' >&2
    exit 0
}

# A venv contains absolute paths, so a moved checkout needs a new one.
fingerprint() {
    pwd
    cksum "$lock" pyproject.toml
}

# Checks the free space of $1, or of its nearest parent that exists.
check_disk() {
    folder=$1
    while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
    free_gb=$(df -Pk "$folder" | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "$free_gb" -ge "$size_gb" ] || leave_out "it needs $size_gb GB, $folder has $free_gb GB free"
}

if [ -f "$stamp" ] && [ "$(fingerprint)" = "$(cat "$stamp")" ] && "$place/bin/python" -c '' >/dev/null 2>&1; then
    exit 0
fi

[ "$(uname -s) $(uname -m)" = 'Linux x86_64' ] || leave_out "its lock is for Linux on x86-64, this is $(uname -sm)"

# An account without a writable home keeps uv's cache in the checkout.
if [ -z "${UV_CACHE_DIR:-}" ]; then
    UV_CACHE_DIR=${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/uv
    mkdir -p "$UV_CACHE_DIR" 2>/dev/null || UV_CACHE_DIR=$PWD/build/uv-cache
    export UV_CACHE_DIR
fi
uv=uv
if ! uv --version >/dev/null 2>&1; then
    sh scripts/setup.sh # installs one
    uv=.venv/bin/uv
fi
python=$("$uv" python find --system --no-python-downloads 3.11 2>/dev/null) ||
    leave_out "it needs Python 3.11. Install one (uv python install 3.11), then: make parts"
check_disk "$PWD/$place"
check_disk "$UV_CACHE_DIR"

install() {
    if [ ! -x "$place/bin/python" ] || ! grep -q "$PWD/$place" "$place/bin/activate"; then
        "$uv" venv --clear --python "$python" "$place"
    fi
    "$uv" pip sync --python "$place/bin/python" --only-binary :all: --require-hashes "$lock"
    "$uv" pip install --python "$place/bin/python" --no-deps --no-build-isolation --editable .
}

printf 'parts: installing vLLM into %s: %s GB on disk, 1 to 5 minutes the first time (log: %s)\n' \
    "$place" "$size_gb" "$log" >&2
mkdir -p build/parts
rm -f "$stamp"
set +e # `install` runs in a subshell with `set -e`, so it still stops at its first error
(set -e; install) >"$log" 2>&1 &
installing=$!
trap 'kill "$installing" 2>/dev/null' INT TERM
waited=0
while kill -0 "$installing" 2>/dev/null; do
    sleep 1
    waited=$((waited + 1))
    [ $((waited % 10)) != 0 ] || printf 'parts: vLLM: %s s, %s\n' "$waited" "$(tail -n 1 "$log" | cut -c 1-80)" >&2
done
wait "$installing"
status=$?
set -e
if [ "$status" != 0 ]; then
    tail -n 5 "$log" >&2
    leave_out "the installation failed. Is a Python package registry reachable? See $log"
fi
fingerprint >"$stamp"
printf 'parts: vLLM installed in %s s\n' "$waited" >&2
