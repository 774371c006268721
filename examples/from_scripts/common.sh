# Read by the three scripts. MODEL, MODEL_ARGS_FILE, DATA and SAVE may be set from outside.
SCRIPTS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "$SCRIPTS/../.."
source scripts/python.sh
DATA="${DATA:-examples/from_scripts/problems.jsonl}"
SAVE="${SAVE:-outputs/from_scripts/checkpoints}"
MODEL_ARGS=()
