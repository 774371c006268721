#!/usr/bin/env bash
# Run the suite stage-a-cpu: style, types, spelling, docs, then tests/fast. pytest's summary is printed last.
#   bash tests/run.sh            all checks and tests except the slow tests
#   bash tests/run.sh --all      then run the slow tests too, and list those that take longest
#   bash tests/run.sh -k loss    pass further arguments to pytest (-n 0: in one process)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh || exit 1

pytest_args=()
all=
for arg in "$@"; do
    if [ "$arg" = --all ]; then all=1; else pytest_args+=("$arg"); fi
done

# The tests of the report's page open it in Chromium; without one they are skipped, and say so. Only the download may be
# cut off: a package manager that is killed while it installs leaves a broken system.
install_chromium() {
    command -v chromium google-chrome >/dev/null || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null && return
    timeout 45 bash -c 'apt-get update -qq && apt-get install -y -qq --no-install-recommends --download-only chromium' &&
        apt-get install -y -qq --no-install-recommends chromium && return
    echo "no chromium: apt-get could not download it within 45 s"
}

# Tests start some hundred processes, which all import the project. If an image sets this, each would compile it again.
unset PYTHONDONTWRITEBYTECODE

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
names=()
failed=()
start() { # start NAME COMMAND...: run it alongside the others
    local name="$1"
    shift
    names+=("$name")
    {
        "$@" >"$work/$name.output" 2>&1
        echo $? >"$work/$name.status"
    } &
}

install_chromium >"$work/chromium" 2>&1 &
start "mypy" "$VENV/bin/mypy" # takes longest
start "ruff check" "$VENV/bin/ruff" check .
start "ruff format" "$VENV/bin/ruff" format --check .
start "codespell" "$VENV/bin/codespell"
# Not --quiet: it hides warnings from --strict as well.
start "mkdocs" "$VENV/bin/mkdocs" build --strict --site-dir "$work/site"
# Alongside mypy a core is free. This compiles the tests once, which the workers below would each do at the same moment.
start "tests are found" env OMP_NUM_THREADS=1 "$PYTHON" -m pytest -n 0 --collect-only -q
wait
for name in "${names[@]}"; do
    if [ "$(cat "$work/$name.status")" = 0 ]; then
        echo "ok      $name"
    else
        cat "$work/$name.output"
        echo "FAILED  $name"
        failed+=("$name")
    fi
done
grep "^no chromium" "$work/chromium" >&2
[ ${#failed[@]} -eq 0 ] || echo "FAILED before the tests: ${failed[*]}"

run_tests() { # WORKERS PYTEST_ARGUMENTS...
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$PYTHON" -m pytest -n "$1" --dist loadfile "${@:2}" "${pytest_args[@]}"
}

# Three workers keep two cores busy, as many tests mostly wait. The slow tests start more processes each.
# With the slow tests, properties are tried on other examples, and on more.
run_tests 3 --durations=20 ${all:+--hypothesis-profile random} || failed+=("tests")
if [ -n "$all" ]; then
    run_tests 2 --durations=100 -m slow --hypothesis-profile random || failed+=("slow tests")
fi
[ ${#failed[@]} -eq 0 ]
