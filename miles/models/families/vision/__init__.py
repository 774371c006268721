"""Vision-language models: a file per ``model_type``, with a ``VisionFamily`` as ``VISION``."""
