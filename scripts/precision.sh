# Source this after scripts/venv.sh to set $PRECISION to the faster of --bf16 and --fp32 on this machine.
# A CPU without bf16 arithmetic emulates it: a step of the quickstart takes several times as long as in fp32.
PRECISION=--fp32
if "$PYTHON" -c 'import sys
from miles.base.host import has_bf16, has_gpu
sys.exit(not (has_bf16() or has_gpu()))'; then
    PRECISION=--bf16
fi
