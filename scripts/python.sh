# Source this at the root of the repository to set $PYTHON and install nothing: your PYTHON, else the interpreter of the
# environment ($VENV, default .venv), else python3.
if [ -z "${PYTHON:-}" ]; then
    PYTHON="${VENV:-.venv}/bin/python"
    [ -x "$PYTHON" ] || PYTHON=python3
fi
