"""One file per family of vision-language models, with a list ``VISION``. Imported for a model with a vision tower."""
