"""vLLM servers as an engine."""

TRANSFER = "miles"  # the name of transfer.py's engine in vLLM
