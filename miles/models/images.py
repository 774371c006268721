"""Images for vision-language models: decode them, and have the model's processor make tokens and tensors of them.

A family of such models is one file of ``families/vision/``, with its ``model_type`` as name and a ``VisionFamily`` as
``VISION``. Pillow, transformers' processors and torchvision are imported when the first image is read.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from miles.base.text import InputError, one_line
from miles.models.families import vision
from miles.models.reading import read_config
from miles.types.images import ImageTensors, PromptImages
from miles.types.sample import IMAGE_PLACEHOLDER, data_uri

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

THUMBNAIL = 128  # pixels of the longer side of an image on the page of a run
MOST_THUMBNAILS = 4  # images of a prompt that are there
MOST_PIXELS = 89_478_485  # of one image, as its header states; Pillow warns of larger ones, which may be bombs


class VisionFamily:
    """The vision-language models of one ``model_type``.

    Attributes:
        inputs: The tensors that the processor makes of images for ``get_image_features``, with the images along the
            first axis.
        encoders: The parts of the model's body that ``--freeze-vision-tower`` freezes: all that encodes images.
    """

    inputs: tuple[str, ...]
    encoders: tuple[str, ...]

    def prepare(self, body: Any) -> None:
        """Let the tower of a model without its head compute the same in fewer operations, if that is known here."""

    def grids(self, config: Any, tensors: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Return the grid of tokens of each image, int64 [images, 3]; None without 3-D rotary positions."""
        return None

    def sized(self, processor: Any, sizes: Sequence[tuple[int, int]]) -> Mapping[str, Any]:
        """Return what ``replace_image_token`` of the processor reads, for the images of a prompt, by width and height.

        It depends on the sizes alone, so blank images are processed.

        Raises:
            ValueError: The processor refuses an image of such a size.
        """
        from PIL import Image

        blank = [Image.new("RGB", size) for size in sizes]
        processed: Mapping[str, Any] = processor.image_processor([blank], return_tensors="np")
        return processed

    def blank(self, config: Any) -> dict[str, np.ndarray]:
        """Return tensors of the smallest image, for ranks that have none."""
        raise NotImplementedError

    def features(self, body: Any, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the features that replace embeddings [tokens, hidden]; then those added after layers."""
        import torch

        return [torch.cat(tuple(body.get_image_features(**tensors, return_dict=True).pooler_output))]


@cache
def vision_family(model_type: str) -> VisionFamily:
    """Return the family of a type of model, one of ``WITH_IMAGES``."""
    family: VisionFamily = import_module(f"{vision.__name__}.{model_type}").VISION
    return family


def text_inputs(
    body: Any, ids: torch.Tensor, feature: torch.Tensor | None, features: list[torch.Tensor] | None
) -> dict[str, Any]:
    """Return the inputs that the language part of a model reads instead of the tokens ``ids`` [rows, T].

    Args:
        body: The model without its head.
        ids: The tokens.
        feature: For each token the row of the features instead of its embedding, int64 [rows, T]; -1 for text.
        features: As ``VisionFamily.features`` returns them; None without images.
    """
    import torch

    embeddings = body.get_input_embeddings()(ids)
    if feature is None or features is None:
        return {"inputs_embeds": embeddings}
    is_image = feature >= 0
    images = features[0][feature.clamp(min=0)].to(embeddings.dtype)
    inputs: dict[str, Any] = {"inputs_embeds": torch.where(is_image[..., None], images, embeddings)}
    if features[1:]:
        deeper = [layer[feature[is_image]] for layer in features[1:]]
        inputs |= {"visual_pos_masks": is_image, "deepstack_visual_embeds": deeper}
    return inputs


def joined(batches: Sequence[ImageTensors], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the tensors of the images of several prompts, along the first axis; others are padded to the longest."""
    import torch

    tensors = {}
    for name in batches[0].tensors:
        arrays = [batch.tensors[name] for batch in batches]
        shape = np.max([array.shape[1:] for array in arrays], axis=0).astype(int)
        padded = []
        for array in arrays:
            missing = [(0, longest - length) for longest, length in zip(shape, array.shape[1:], strict=True)]
            padded.append(np.pad(array, [(0, 0), *missing]))
        tensors[name] = torch.from_numpy(np.concatenate(padded)).to(device)
    return tensors


@cache
def _config(model: str) -> Any:
    return read_config(model)


@cache
def load_processor(model: str) -> Any:
    """Return the processor of a folder, or of a name on the hub.

    Raises:
        InputError: It cannot be loaded.
    """
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(model)
        if not hasattr(processor, "image_processor"):  # a text model has a tokenizer instead of a processor
            raise ValueError("it has none for images")
        return processor
    except (OSError, ValueError, ImportError, AttributeError, KeyError, RuntimeError) as error:
        lacks = isinstance(error, ImportError) or "torchvision" in str(error)
        what_to_do = (
            'install torchvision: pip install "miles[images]"' if lacks else "copy its preprocessor_config.json"
        )
        raise InputError(
            f"--hf-checkpoint {model}: cannot load the processor that reads its images ({type(error).__name__}: "
            f"{one_line(str(error), 300)}); {what_to_do}"
        ) from error


def size_of(file: bytes) -> tuple[int, int]:
    """Return width and height as the header of an encoded image states, turned unchanged to be shown.

    Raises:
        ValueError: It is no image, a huge one, or cut off.
    """
    image = _open(file)
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise ValueError(f"it has {width} x {height} pixels, and at most {MOST_PIXELS} are read; make it smaller")
    if image.format == "EPS":
        raise ValueError("it is EPS, a program that draws; convert it to PNG")
    if image.mode in _DEEP:
        raise ValueError("it has gray values of more than 8 bits, which would become white; convert it to 8 bits")
    if not _is_whole(image, file):
        raise ValueError("it is cut off: its end is missing; copy it again")
    return (height, width) if _exif(image).get(_ORIENTATION, 1) >= _ON_ITS_SIDE else (width, height)


def _is_whole(image: Any, file: bytes) -> bool:
    """Return whether an opened file has its end. Its header, which was read, may hold a whole thumbnail."""
    end = _ENDS.get(str(image.format))
    if end is not None:
        return file.find(end, image.fp.tell()) >= 0
    with suppress(OSError, ValueError, SyntaxError):
        image.load()
        return True
    return False


# The last marker of a whole file; a file of a rarer format is decoded. Pillow opens no WebP that is cut off.
_ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "WEBP": b""}
_DEEP = ("I", "I;16", "I;16B", "I;16L", "F")  # modes of gray values
_ORIENTATION, _ON_ITS_SIDE = 0x0112, 5  # of EXIF, and the first of its values that exchange width and height


def _exif(image: Image) -> Mapping[int, Any]:
    """Return the EXIF entries of a header. Behind the pixels of a PNG they are not looked for: that decodes it."""
    return image.getexif() if image.format != "PNG" or "exif" in image.info else {}


def _open(file: bytes) -> Image:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(file))
    except Image.DecompressionBombError as error:
        raise ValueError(f"it is huge, and at most {MOST_PIXELS} pixels are read; make it smaller") from error
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise ValueError("it is no image that Pillow reads") from error


def bounded(size: tuple[int, int], least: int | None, most: int | None) -> tuple[int, int]:
    """Return the size of an image with ``least`` to ``most`` pixels and nearly the same shape.

    >>> bounded((400, 100), None, 10_000)
    (200, 50)
    """
    width, height = size
    pixels = width * height
    if most is not None and pixels > most:
        scale = math.sqrt(most / pixels)
        return max(1, math.floor(width * scale)), max(1, math.floor(height * scale))
    if least is not None and pixels < least:
        scale = math.sqrt(least / pixels)
        return math.ceil(width * scale), math.ceil(height * scale)
    return size


@lru_cache(maxsize=4096)
def expansions(model: str, sizes: tuple[tuple[int, int], ...]) -> tuple[str, ...]:
    """Return the text that the processor puts instead of each placeholder, for images of a prompt of these sizes.

    Raises:
        ValueError: The processor refuses an image of such a size.
    """
    processor = load_processor(model)
    sized = vision_family(_config(model).model_type).sized(processor, sizes)
    return tuple(processor.replace_image_token(sized, image_idx=number) for number in range(len(sizes)))


def decoded(images: PromptImages) -> list[Image]:
    """Return the pixels of the images, resized within the flags' bounds.

    Raises:
        InputError: A file is broken behind its header.
    """
    from PIL import Image, ImageOps

    pixels = []
    for number, (file, size) in enumerate(zip(images.files, images.sizes, strict=True), start=1):
        try:
            image = _open(file)
            image = (ImageOps.exif_transpose(image) if _exif(image) else image).convert("RGB")
        except (OSError, ValueError, SyntaxError) as error:
            raise InputError(
                f"{images.where}: image {number} is broken behind its header ({one_line(str(error), 200)}); replace it"
            ) from error
        pixels.append(image if image.size == size else image.resize(size, Image.Resampling.BICUBIC))
    return pixels


def thumbnails(images: PromptImages, tokens: int) -> list[str]:
    """Return small JPEGs of the images that begin in the first ``tokens`` tokens, the first few, as data: URIs."""
    if "thumbnails" not in images.cache:
        images.cache["thumbnails"] = [_thumbnail(image) for image in decoded(images)[:MOST_THUMBNAILS]]
    uris: list[str] = images.cache["thumbnails"]
    return uris[: sum(start < tokens for start in images.starts)]


def _thumbnail(image: Image) -> str:
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=70)
    return data_uri("image/jpeg", buffer.getvalue())


def encoded(images: PromptImages) -> PromptImages:
    """Return a copy whose files are PNG with the pixels of ``decoded``, for servers, which may read others differently.

    Raises:
        InputError: A file is broken behind its header.
    """
    files = []
    for file, image in zip(images.files, decoded(images), strict=True):
        original = _open(file)
        if (original.format, original.mode, original.size) != ("PNG", "RGB", image.size) or _exif(original):
            buffer = io.BytesIO()
            image.save(buffer, "PNG", compress_level=1)
            file = buffer.getvalue()
        files.append(file)
    return replace(images, files=tuple(files), cache={})


def has_other_media(images: PromptImages, token_ids: Sequence[int]) -> bool:
    """Return whether a server may find more images in the tokens than ``images``, or a video.

    SGLang takes the text ``<image>`` for an image, too, and fails if nothing follows the token that begins one.
    """
    processor = load_processor(images.model)
    sent = images.unexpanded(token_ids)
    media = sent.count(images.placeholder_id) + sent.count(getattr(processor, "video_token_id", -1))
    is_begun = sent[-1] == getattr(_config(images.model), "vision_start_token_id", -1)
    return (
        media > len(images.files)
        or is_begun
        or (processor.image_token != IMAGE_PLACEHOLDER and IMAGE_PLACEHOLDER in processor.tokenizer.decode(sent))
    )


def tensors_of(images: PromptImages) -> ImageTensors:
    """Return the tensors that the model's processor makes of the images, once in this process for each prompt.

    Raises:
        InputError: A file is broken behind its header.
    """
    if "tensors" not in images.cache:
        config = _config(images.model)
        family = vision_family(config.model_type)
        processed = load_processor(images.model).image_processor([decoded(images)], return_tensors="np")
        tensors = {name: np.asarray(processed[name]) for name in family.inputs}
        grids = family.grids(config, tensors)
        layout = images.counts, images.starts, images.placeholder_id
        images.cache["tensors"] = ImageTensors(tensors, *layout, grids)
    result: ImageTensors = images.cache["tensors"]
    return result
