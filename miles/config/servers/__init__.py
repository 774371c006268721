"""Servers that an engine generates in, of any program: SGLang's own is in ``sglang/``, vLLM's in ``vllm/``."""
