"""Read a model's configuration as transformers does, without code from the model's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.model_families.installed_transformers import READ_AS

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def read_config(path: str) -> PretrainedConfig:
    """Return the configuration of a folder, or of a name on the hub.

    A type that transformers does not know, and whose layers are those of one that it knows (``READ_AS``), is read as
    the latter. Pass the result to ``from_pretrained`` as ``config``.
    """
    from transformers import AutoConfig, PretrainedConfig  # slow to import

    found, _ = PretrainedConfig.get_config_dict(path)
    kind = READ_AS.get(str(found.get("model_type")))
    if kind is None:
        config: PretrainedConfig = AutoConfig.from_pretrained(path)
        return config
    # auto_map names code in the folder, which is not run.
    known = {name: value for name, value in found.items() if name not in ("auto_map", "model_type")}
    return AutoConfig.for_model(kind, **known)
