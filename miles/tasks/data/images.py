"""The images of a row: find them in its column and in its messages, read the files, and render their placeholders.

Imported when the first row with images is read.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from miles.base.flags import json_object
from miles.base.text import one_line
from miles.models.images import bounded, expansions, load_processor, size_of
from miles.models.reading import WITH_IMAGES, read_config
from miles.tasks.data.row import Row, state_of
from miles.tasks.data.settings import HUGGING_FACE, DataArguments
from miles.types.images import PromptImages
from miles.types.sample import IMAGE_PLACEHOLDER

_LARGEST_DOWNLOAD = 64 << 20  # bytes of an image behind a URL
_SECONDS = 30.0
_LONGEST_PATH = 4096  # characters
_SHORTEST_BASE64 = 64  # characters: shorter text is a path
_FORMS = "give a path, a data: URI, base64, bytes or an object with bytes or path"
_KEYS = ("image", "url", "path", "base64", "bytes", "image_url")  # of a content part, that hold the image
_NO_MORE = object()
_NO_IMAGE = {"video": "video", "audio": "audio", "video_url": "video", "input_audio": "audio"}


@dataclass(frozen=True)
class ImageFile:
    """An encoded image instead of its part of a message, and the size that it is resized to."""

    content: bytes
    size: tuple[int, int]

    @property
    def digest(self) -> str:
        """A text that is equal for equal files."""
        return blake2b(self.content, digest_size=16).hexdigest()


class ImageReader:
    """Reads the images of rows for one model."""

    def __init__(self, data: DataArguments, model: str) -> None:
        """Load the model's processor.

        Raises:
            InputError: The processor cannot be loaded.
        """
        self._data, self._model = data, model
        self._key = json_object("multimodal_keys", data.multimodal_keys).get("image")
        self._processor = load_processor(model)

    @classmethod
    def of_model(cls, data: DataArguments, model: str) -> ImageReader | None:
        """Return the reader of a model; None if it reads no images here."""
        try:
            kind = str(read_config(model).model_type)
        except (OSError, ValueError):  # a tokenizer alone
            return None
        return cls(data, model) if kind in WITH_IMAGES else None

    @property
    def template(self) -> str | None:
        """The chat template that writes placeholders: the processor's, if it has one."""
        template: str | None = self._processor.chat_template
        return template

    @property
    def placeholder(self) -> str:
        """The token of one image."""
        return str(self._processor.image_token)

    def messages(self, row: Row, messages: Sequence[Any]) -> list[Any]:
        """Return messages whose images are parts with an ``ImageFile``.

        The text ``<image>`` in a message, and a part without an image, are filled from the column of
        ``--multimodal-keys``, in order.

        Raises:
            InputError: An image is missing, broken or huge, or placeholders and images are not equally many.
        """
        column = self._column(row)
        left = iter(column)
        result = [self._message(row, number, message, left) for number, message in enumerate(messages, start=1)]
        unused = sum(1 for _ in left)
        if unused:
            self._refuse_count(row, len(column) - unused, len(column))
        return result

    def _message(self, row: Row, number: int, message: Any, left: Iterator[Any]) -> Any:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str) and self._key is not None and IMAGE_PLACEHOLDER in content:
            first, *others = content.split(IMAGE_PLACEHOLDER)
            parts = [{"type": "text", "text": first}]
            for text in others:
                parts += [{"type": "image"}, {"type": "text", "text": text}]
            content = [part for part in parts if part.get("text", "image")]
        if not isinstance(content, list):
            return message
        parts = [self._part(row, f"message {number}, part {p}", part, left) for p, part in enumerate(content, start=1)]
        return {**message, "content": parts}

    def _part(self, row: Row, where: str, part: Any, left: Iterator[Any]) -> dict[str, Any]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _NO_IMAGE:
            row.refuse(f"{where}: {_NO_IMAGE[kind]} is not trained on; remove it")
        if kind == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if kind not in ("image", "image_url"):
            row.refuse(f"{where}: is no text and no image; give parts of type text or image")
        source = next((part[key] for key in _KEYS if part.get(key) is not None), None)
        if isinstance(source, dict) and "url" in source:
            source = source["url"]
        if source is not None:
            return {"type": "image", "image": self._file(row, where, source)}
        if self._key is None:
            row.refuse(f"{where}: has no image; give one, or name the column of images with --multimodal-keys")
        source = next(left, _NO_MORE)
        if source is _NO_MORE:
            column = self._column(row)
            self._refuse_count(row, len(column) + 1, len(column))
        return {"type": "image", "image": self._file(row, f"column {self._key!r}", source)}

    def _column(self, row: Row) -> list[Any]:
        value = None if self._key is None else row.find(self._key)
        if value is None:
            return []
        return list(value) if isinstance(value, list | tuple) else [value]

    def _refuse_count(self, row: Row, placeholders: int, images: int) -> None:
        at_least = "at least " if placeholders > images else ""
        row.refuse(
            f"column {self._key!r} has {images} images, and the prompt has {at_least}{placeholders} placeholders "
            f"{IMAGE_PLACEHOLDER}; write one for each image"
        )

    def _file(self, row: Row, where: str, value: Any) -> ImageFile:
        try:
            content = self._content(row, value)
            size = bounded(size_of(content), self._data.image_min_pixels, self._data.image_max_pixels)
            expansions(self._model, (size,))
        except ValueError as error:
            row.refuse(f"{where}: the image cannot be used: {one_line(str(error), 300)}")
        return ImageFile(content, size)

    def _content(self, row: Row, value: Any) -> bytes:
        if isinstance(value, dict):
            content = value.get("bytes")
            value = value.get("path") if content is None else content
        if isinstance(value, bytes | bytearray):
            return bytes(value)
        if not isinstance(value, str) or not value:
            raise ValueError(f"it is {'missing' if not value else f'of type {type(value).__name__}'}; {_FORMS}")
        if value.startswith("data:"):
            return _base64(value.partition(",")[2])
        if value[:8].lower().startswith(("http://", "https://")):
            return self._download(value)
        path = Path(unquote(urlsplit(value).path) if value.startswith("file:") else value)
        path = path if path.is_absolute() else _folder(row) / path
        if len(value) < _LONGEST_PATH and os.path.isfile(path):  # unlike Path, false for a name that cannot be one
            row.files[str(path.absolute())] = state_of(str(path))
            try:
                return path.read_bytes()
            except OSError as error:
                raise ValueError(f"{path} cannot be read ({error.strerror})") from error
        if len(value) < _SHORTEST_BASE64:
            raise ValueError(f"there is no file {path}; correct the path, which is relative to the data file")
        return _base64(value)

    def _download(self, url: str) -> bytes:
        if not self._data.allow_image_urls:
            raise ValueError(f"{one_line(url, 100)} is on the network; download it, or add --allow-image-urls")
        import httpx

        content = b""
        try:
            with httpx.stream("GET", url, timeout=_SECONDS, follow_redirects=True) as answer:
                answer.raise_for_status()
                for part in answer.iter_bytes():
                    content += part
                    if len(content) > _LARGEST_DOWNLOAD:
                        raise ValueError(f"{one_line(url, 100)} has more than {_LARGEST_DOWNLOAD >> 20} MiB")
        except httpx.HTTPError as error:
            raise ValueError(f"{one_line(url, 100)} cannot be fetched ({one_line(str(error), 200)})") from error
        return content

    def expand(self, row: Row, text: str, files: Sequence[ImageFile], before: PromptImages | None = None) -> str:
        """Return rendered text with each placeholder in the form that the model's tokenizer reads.

        ``before`` are the images of earlier turns, which are not in the text.

        Raises:
            InputError: The template has written more or fewer placeholders than there are images.
        """
        parts = text.split(self.placeholder)
        if len(parts) - 1 != len(files):
            row.refuse(
                f"the chat template writes {len(parts) - 1} placeholders {self.placeholder} for {len(files)} images; "
                "look at --apply-chat-template-kwargs, and remove the token from the text"
            )
        if files and before is None and self.placeholder != IMAGE_PLACEHOLDER and IMAGE_PLACEHOLDER in text:
            row.refuse(f"has the text {IMAGE_PLACEHOLDER} next to parts that are images; remove it from the text")
        written = self._expansions(row, files, before)
        return "".join(part + image for part, image in zip(parts, (*written, ""), strict=True))

    def _expansions(self, row: Row, files: Sequence[ImageFile], before: PromptImages | None) -> tuple[str, ...]:
        earlier = () if before is None else before.sizes
        written = expansions(self._model, (*earlier, *(file.size for file in files))) if files else ()
        counts = tuple(text.count(self.placeholder) for text in written[: len(earlier)])
        if before is not None and written and counts != before.counts:
            row.refuse("this model reads an image in another way if others follow; give all images in one turn")
        return written[len(earlier) :]

    def prompt_images(
        self, row: Row, files: Sequence[ImageFile], token_ids: Sequence[int], before: PromptImages | None = None
    ) -> PromptImages:
        """Return the images of a prompt or a conversation with these tokens, or of a later turn; see ``expand``.

        Raises:
            InputError: The tokens have other placeholders than the images take.
        """
        sizes = tuple(file.size for file in files)
        placeholder_id = int(self._processor.image_token_id)
        counts = tuple(text.count(self.placeholder) for text in self._expansions(row, files, before))
        positions = [place for place, token in enumerate(token_ids) if token == placeholder_id]
        if len(positions) != sum(counts):
            row.refuse(
                f"its tokens have other placeholders {self.placeholder} than its images take; remove that text, or the "
                "images behind the last message that is trained on"
            )
        return PromptImages(
            tuple(file.content for file in files),
            sizes,
            counts,
            tuple(positions[end - count] for end, count in zip(accumulate(counts), counts, strict=True)),
            placeholder_id,
            self._model,
            row.where,
        )


def _folder(row: Row) -> Path:
    """Return the folder that paths in a row are relative to: its data file's."""
    source = Path(row.where.rpartition(":")[0].removeprefix(HUGGING_FACE))
    return source if source.is_dir() else source.parent


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{one_line(text, 40)!r} is no path of a file and no base64; {_FORMS}") from error
