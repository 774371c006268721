# Source this from the run.sh of a reproduction.
#   reproduce NAME "$@"    run its sweep, or what is left of it, and print its tables; further flags go to miles sweep
# Environment: PYTHON (an interpreter; default: install .venv and use it). All is written to outputs/reproduce.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUTPUTS=outputs/reproduce # the definitions name this folder
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}" # the matrices are tiny: a waiting thread must not keep a core busy

reproduce() {
    local name="$1"
    shift
    [ -n "${PYTHON:-}" ] || source scripts/venv.sh
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
    [ -d "$OUTPUTS/numbers" ] || "$PYTHON" -m examples.reproduce.numbers.write "$OUTPUTS/numbers"
    # One core per run, even if trainer and engine are two devices: the matrices are tiny.
    "$PYTHON" -m miles sweep "examples/reproduce/$name/sweep.yaml" --one-process --jobs "$(nproc)" --out "$OUTPUTS/$name" "$@"
    case " $* " in *" --explain "*) return ;; esac
    "$PYTHON" examples/reproduce/reproduction_results.py show "$OUTPUTS/$name"
}
