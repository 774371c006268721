"""Images of rows: every form, the tokens of the model's processor, and refused rows."""

import base64
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from vision_models import KINDS, image, png, write_vision_model

from miles.base.text import InputError
from miles.base.tokenizer import load_tokenizer
from miles.models.images import decoded, encoded, load_processor, size_of, tensors_of
from miles.tasks.data.prompts import load_prompts
from miles.tasks.data.settings import DataArguments
from miles.types.images import PromptImages
from miles.types.sample import Prompt

DATA = DataArguments(
    input_key="problem", label_key="answer", apply_chat_template=True, multimodal_keys='{"image": "images"}'
)


@pytest.fixture(scope="module", params=KINDS)
def each_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_vision_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def prompts(folder: Path, rows: list[dict], model: str, data: DataArguments = DATA) -> list[Prompt]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"answer": "1"} | row) + "\n" for row in rows))
    return list(load_prompts(str(file), data, load_tokenizer(model)))


@pytest.mark.parametrize("sizes", [[(16, 12)], [(40, 24), (9, 33)], []])
def test_tokens_and_tensors_are_those_of_the_processor(
    each_model: str, tmp_path: Path, sizes: list[tuple[int, int]]
) -> None:
    images = [image(i, *size) for i, size in enumerate(sizes)]
    column = [base64.b64encode(png(i, *size)).decode() for i, size in enumerate(sizes)]
    text = "".join(f"{i}: <image> and\n" for i in range(len(sizes))) + "how many?"
    (prompt,) = prompts(tmp_path, [{"problem": text, "images": column}], each_model)
    parts = [
        part
        for i, one in enumerate(images)
        for part in (
            {"type": "text", "text": f"{i}: "},
            {"type": "image", "image": one},
            {"type": "text", "text": " and\n"},
        )
    ]
    # The template writes neighboring texts as one, so the cut between them does not matter.
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "how many?"}]}]
    made = load_processor(each_model).apply_chat_template(
        messages, tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="np"
    )
    assert list(prompt.token_ids) == made["input_ids"][0].tolist()
    if not sizes:
        assert prompt.images is None
        return
    assert prompt.images is not None
    tensors = tensors_of(prompt.images)
    for name, tensor in tensors.tensors.items():
        assert (tensor == made[name]).all(), name
    assert prompt.images.unexpanded(prompt.token_ids).count(tensors.placeholder_id) == len(sizes)
    assert len(tensors.places(made["input_ids"][0])) == sum(tensors.counts)


def test_each_form_of_an_image_is_the_same_image(model: str, tmp_path: Path) -> None:
    file = png(1)
    (tmp_path / "a b.png").write_bytes(file)
    text = base64.b64encode(file).decode()
    forms = ["a b.png", str(tmp_path / "a b.png"), f"file://{tmp_path}/a%20b.png", f"data:image/png;base64,{text}"]
    forms += [text, {"bytes": text, "path": None}, {"bytes": None, "path": "a b.png"}]
    rows = [{"problem": "<image>?", "images": [form]} for form in forms] + [{"problem": "<image>?", "images": forms[0]}]
    parts = [{"image": forms[0]}, {"url": forms[3]}, {"path": forms[1]}, {"base64": text}]
    for part in [{"type": "image"} | part for part in parts] + [{"type": "image_url", "image_url": {"url": forms[3]}}]:
        rows.append({"problem": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]})
    rows.append(
        {
            "problem": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}],
            "images": forms[0],
        }
    )
    made = prompts(tmp_path, rows, model)
    assert {prompt.images.files for prompt in made if prompt.images} == {(file,)}
    assert len({prompt.token_ids for prompt in made}) == 1 and len(made) == len(rows)


def test_bytes_and_structs_in_parquet_and_saved_sets(model: str, tmp_path: Path) -> None:
    import datasets

    file = png(2)
    columns = {"problem": ["<image>?"], "answer": ["1"]}
    pq.write_table(pa.table(columns | {"images": [[file]]}), tmp_path / "bytes.parquet")
    pq.write_table(pa.table(columns | {"images": [[{"bytes": file, "path": None}]]}), tmp_path / "structs.parquet")
    features = datasets.Features(
        problem=datasets.Value("string"), answer=datasets.Value("string"), images=datasets.List(datasets.Image())
    )
    rows = columns | {"images": [[image(2)]]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    for source in ("bytes.parquet", "structs.parquet", "saved"):
        (prompt,) = load_prompts(str(tmp_path / source), DATA, load_tokenizer(model))
        assert prompt.images is not None
        assert decoded(prompt.images)[0].tobytes() == image(2).tobytes(), source


TEXT = {"type": "text", "text": "<image> what?"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "<image>", "images": ["none.png"]}, "column 'images': the image cannot be used: there is no file"),
        ({"problem": "<image>", "images": ["text.png"]}, "it is no image that Pillow reads"),
        ({"problem": "<image>", "images": [7]}, "it is of type int; give a path"),
        ({"problem": "<image>", "images": [None]}, "the image cannot be used: it is missing"),
        ({"problem": "<image>", "images": ["cut.png"]}, "it is cut off: its end is missing; copy it again"),
        ({"problem": "<image>", "images": ["cut.jpg"]}, "it is cut off"),
        ({"problem": "<image>", "images": ["cut_with_thumbnail.jpg"]}, "it is cut off"),
        ({"problem": "<image>", "images": ["cut.gif"]}, "it is cut off"),
        ({"problem": "<image>", "images": ["cut.webp"]}, "it is no image that Pillow reads"),
        ({"problem": "<image>", "images": ["deep.png"]}, "it has gray values of more than 8 bits"),
        ({"problem": "<image>", "images": ["a.eps"]}, "it is EPS, a program that draws; convert it to PNG"),
        ({"problem": "<image>", "images": ["huge.png"]}, "it is huge, and at most"),
        ({"problem": "<image>", "images": ["large.png"]}, "it has 10000 x 10000 pixels, and at most"),
        ({"problem": "<image>", "images": ["thin.png"]}, "absolute aspect ratio"),
        ({"problem": "<image>", "images": ["HTTPS://example.org/a.png"]}, "add --allow-image-urls"),
        ({"problem": "<image>", "images": ["data:image/png;base64,%%"]}, "no base64"),
        (
            {"problem": "<image><image>", "images": ["a.png"]},
            "has 1 images, and the prompt has at least 2 placeholders",
        ),
        ({"problem": "?", "images": ["a.png"]}, "has 1 images, and the prompt has 0 placeholders"),
        ({"problem": "<image>"}, "has 0 images, and the prompt has at least 1 placeholders"),
        ({"problem": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}, "video is not trained on"),
        ({"problem": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "audio is not trained on"),
        ({"problem": [{"role": "user", "content": ["text"]}]}, "message 1, part 1: is no text and no image"),
        ({"problem": [{"role": "user", "content": []}]}, "message 1: its content is empty"),
        (
            {"problem": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, TEXT]}]},
            "has the text <image> next to parts that are images",
        ),
    ],
)
def test_bad_images_are_refused_with_their_place(model: str, tmp_path: Path, row: dict, message: str) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    (tmp_path / "thin.png").write_bytes(png(1, 900, 2))
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes(png(1, 64, 64)[:-20])
    image(1).save(tmp_path / "whole.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:-2])
    whole = (tmp_path / "whole.jpg").read_bytes()
    thumbnail = b"\xff\xe1" + (len(whole) + 2).to_bytes(2, "big") + whole
    (tmp_path / "cut_with_thumbnail.jpg").write_bytes(whole[:2] + thumbnail + whole[2:-2])
    for kind in ("gif", "webp"):
        image(1, 64, 64).save(tmp_path / f"whole.{kind}")
        file = (tmp_path / f"whole.{kind}").read_bytes()
        (tmp_path / f"cut.{kind}").write_bytes(file[: len(file) // 2])
    image(1).convert("L").convert("I;16").save(tmp_path / "deep.png")
    image(1).save(tmp_path / "a.eps")
    (tmp_path / "huge.png").write_bytes(_with_size(png(1), 40_000, 30_000))
    (tmp_path / "large.png").write_bytes(_with_size(png(1), 10_000, 10_000))
    with pytest.raises(InputError, match=message) as error:
        prompts(tmp_path, [{"problem": "<image>", "images": "a.png"}, row], model)
    assert "rows.jsonl:2: " in str(error.value)


def test_a_placeholder_without_a_column_of_images_is_refused(model: str, tmp_path: Path) -> None:
    data = DataArguments(**(vars(DATA) | {"multimodal_keys": None}))
    with pytest.raises(InputError, match=r"rows.jsonl:1: has the text <image>, and no column of images is named"):
        prompts(tmp_path, [{"problem": "<image>?", "images": "a.png"}], model, data)


def _with_size(file: bytes, width: int, height: int) -> bytes:
    import struct
    import zlib

    chunk = b"IHDR" + struct.pack(">II", width, height) + file[24:29]
    return file[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + file[33:]


def test_a_file_broken_behind_its_header_is_refused_when_it_is_drawn(model: str, tmp_path: Path) -> None:
    whole = png(1, 64, 64)
    (tmp_path / "torn.png").write_bytes(whole[:300] + whole[400:])
    (prompt,) = prompts(tmp_path, [{"problem": "<image>", "images": "torn.png"}], model)
    assert prompt.images is not None
    with pytest.raises(InputError, match=r"rows.jsonl:1: image 1 is broken behind its header"):
        tensors_of(prompt.images)


def test_a_file_that_has_changed_since_the_last_check_is_checked_again(model: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "<image>", "answer": "1", "images": "a.png"}) + "\n")
    tokenizer, source = load_tokenizer(model), str(tmp_path / "rows.jsonl")
    assert len(load_prompts(source, DATA, tokenizer)) == 1
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(InputError, match=r"rows.jsonl:1: .* no image that Pillow reads"):
        load_prompts(source, DATA, tokenizer)


def test_pixels_are_those_that_transformers_reads(tmp_path: Path) -> None:
    from transformers.image_utils import load_image

    turned = Image.Exif()
    turned[0x0112] = 6
    files = []
    for kind, mode, options in (
        *(("PNG", mode, {}) for mode in ("1", "L", "LA", "P", "RGBA")),
        ("JPEG", "CMYK", {}),
        ("JPEG", "RGB", {"exif": turned}),
        ("GIF", "P", {}),
        ("WEBP", "RGBA", {}),
    ):
        buffer = io.BytesIO()
        image(1, 24, 16).convert(mode).save(buffer, kind, **options)
        files.append(buffer.getvalue())
    sizes = tuple(map(size_of, files))
    assert sizes.count((16, 24)) == 1
    images = PromptImages(tuple(files), sizes, (1,) * len(files), (0,) * len(files), 0, "")
    for file, own, sent in zip(files, decoded(images), encoded(images).files, strict=True):
        wanted = load_image(Image.open(io.BytesIO(file)))
        assert own.tobytes() == wanted.tobytes() == load_image(Image.open(io.BytesIO(sent))).tobytes()


def test_pixels_are_bounded_and_an_image_on_its_side_is_turned(model: str, tmp_path: Path) -> None:
    turned = image(3, 64, 32)
    turned.getexif()[0x0112] = 6
    turned.save(tmp_path / "a.jpg", exif=turned.getexif())
    data = DataArguments(**(vars(DATA) | {"image_max_pixels": 512, "image_min_pixels": 256}))
    (tmp_path / "b.png").write_bytes(png(1, 4, 4))
    prompt, small = prompts(
        tmp_path, [{"problem": "<image>", "images": "a.jpg"}, {"problem": "<image>", "images": "b.png"}], model, data
    )
    assert prompt.images is not None and small.images is not None
    assert prompt.images.sizes == ((16, 32),) and small.images.sizes == ((16, 16),)
    for one in (prompt.images, small.images):
        assert decoded(one)[0].size == one.sizes[0] == Image.open(io.BytesIO(encoded(one).files[0])).size
        assert decoded(encoded(one))[0].tobytes() == decoded(one)[0].tobytes()


def test_text_of_a_placeholder_in_a_message_is_text(model: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    (prompt,) = prompts(tmp_path, [{"problem": "<image> <|image_pad|>?", "images": "a.png"}], model)
    assert prompt.images is not None
    assert prompt.token_ids.count(prompt.images.placeholder_id) == sum(prompt.images.counts)


def test_conversations_have_images_and_train_on_text(each_model: str, tmp_path: Path) -> None:
    from miles.tasks.data.conversations import load_conversations

    (tmp_path / "a.png").write_bytes(png(1))
    seven = [{"type": "text", "text": "7"}]
    say = [("user", "<image>?"), ("assistant", seven), ("user", "and <image>?"), ("assistant", "8")]
    row = {"problem": [{"role": role, "content": content} for role, content in say], "images": ["a.png", "a.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (one,) = load_conversations(str(tmp_path / "rows.jsonl"), DATA, load_tokenizer(each_model))
    assert one.prompt.images is one.images is not None
    tokenizer, ids = load_tokenizer(each_model), [*one.token_ids, *one.response_ids]
    trained = [token for token, mask in zip(one.response_ids, one.loss_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == "7<end>8<end>"
    assert ids.count(one.images.placeholder_id) == sum(one.images.counts)


def test_saved_samples_have_their_images(model: str, tmp_path: Path) -> None:
    from miles.rollout.debug_data import load_rollout, save_rollout
    from miles.types.sample import PromptGroup, Sample

    (tmp_path / "a.png").write_bytes(png(1))
    (prompt,) = prompts(tmp_path, [{"problem": "<image>", "images": "a.png"}], model)
    group = PromptGroup(0, prompt, [Sample(prompt, 0, 0, [5], "", [1], [0.0], reward=1.0)])
    save_rollout(f"{tmp_path}/{{rollout_id}}.jsonl", 0, [group])
    (loaded,) = load_rollout(f"{tmp_path}/{{rollout_id}}.jsonl", 0)
    assert loaded.prompt == prompt and loaded.prompt.images == prompt.images
