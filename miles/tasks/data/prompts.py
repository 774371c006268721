"""A prompt set: the rows of a source, rendered and tokenized."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property, partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from miles.base.flags import FlagError
from miles.base.text import InputError
from miles.base.tokenizer import load_tokenizer
from miles.tasks.data.checked_rows import PromptSet, RowsVerdict, caught, check_rows, name_of, verdict_key
from miles.tasks.data.row import Notes, Row, Rows
from miles.tasks.data.settings import DataArguments, of_rows
from miles.tasks.data.sources import open_rows
from miles.tasks.data.tokenizer import PromptRenderer, RenderedPrompt, most_tokens
from miles.tasks.rewards.answer_text import plain_number
from miles.tasks.rewards.settings import RewardArguments
from miles.types.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)

_BOOLEAN_LABEL = "the label is true or false, which built-in rewards refuse"
_BLANK_LABEL = "the label is text without a character, which built-in rewards refuse"
_NO_LABEL = "there is no label, so the reward function gets None"
_NO_LABEL_KEY = "there is no label, as --label-key is not given, so the reward function gets None"


def load_prompts(
    source: str,
    data: DataArguments,
    tokenizer: PreTrainedTokenizerBase | str | None,
    *,
    input_key: str | None = None,
    label_key: str | None = None,
    reward: RewardArguments | None = None,
    max_context_len: int | None = None,
    prompt_set: str = "",
) -> PromptSet[Prompt]:
    """Check the prompts of ``source``: each is rendered and tokenized, here once, and again whenever it is drawn.

    The verdict of an earlier check of the same rows is used (checked_rows.py). Unusual rows that are allowed are
    counted and logged, one line for each kind.

    Text rendered through a chat template is tokenized without special tokens, because templates write them; other text
    with the tokenizer's default. Prompts of more than ``rollout_max_prompt_len`` tokens are dropped, and their number
    is logged; so are prompts that leave no room for a response in ``max_context_len`` tokens.

    Args:
        source: One of ``SOURCES`` (settings.py).
        data: Names of the columns, chat template and length limit.
        tokenizer: The model's tokenizer; or its folder or name, to load it if a row has to be read. With None, rows are
            checked without template and length.
        input_key: Overrides ``data.input_key``. Ignored by ``reasoning_gym`` and ``verifiers``.
        label_key: Overrides ``data.label_key``, in the same way.
        reward: Rows without the values that its rewards compare with are refused. Rows of a custom reward may lack a
            label, but one at least must have it.
        max_context_len: The most tokens of prompt and response together.
        prompt_set: The name of the set in a mixture, which the prompts carry.

    Raises:
        FlagError: For malformed rows, naming file and line, and for a source without prompts.
    """
    rows = open_rows(source)
    columns = _Columns(input_key or data.input_key, label_key or data.label_key, data.metadata_key)
    if rows.columns is not None:
        columns = _Columns(*rows.columns, label_may_be_null=True)
    labels_optional = reward is not None and reward.labels_optional
    if labels_optional:  # if no row has one, the first is refused: the key is a wrong one
        has_any = columns.label is None or any(_has_label(row, columns) for row in _readable(rows))
        columns = replace(columns, label_may_be_null=has_any or columns.label_may_be_null)
    if reward is not None:
        columns = replace(columns, check=reward.check_prompt)
    reader = _Reader(data, tokenizer, columns, prompt_set)
    flag, limit = _limit(data.rollout_max_prompt_len, max_context_len)
    key = verdict_key(source, rows, name_of(tokenizer), of_rows(data), columns.names, reward, limit)
    make = partial(reader.prompts, limit=limit)
    verdict = check_rows(source, rows, make, lambda prompt: len(prompt.token_ids) > limit, key)
    if labels_optional and columns.label is None:
        verdict.notes.add_all(_NO_LABEL_KEY, len(rows), rows[0].where)
    verdict.notes.log(source, len(rows))
    _log_long(source, verdict, flag, limit)
    return PromptSet(rows, verdict, reader.prompt, reader.unrendered, flag)


def _readable(rows: Rows) -> Iterator[Row]:
    batches = (rows.read(start, min(start + 256, len(rows))) for start in range(0, len(rows), 256))
    return (row for batch in batches for row in batch if isinstance(row, Row))


class _Reader:
    """Makes prompts of rows. The tokenizer is loaded when the first is made."""

    def __init__(
        self,
        data: DataArguments,
        tokenizer: PreTrainedTokenizerBase | str | None,
        columns: _Columns,
        prompt_set: str = "",
    ) -> None:
        self._data = data
        self._source = tokenizer
        self._columns = columns
        self._prompt_set = prompt_set

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        assert self._source is not None
        return load_tokenizer(self._source) if isinstance(self._source, str) else self._source

    @cached_property
    def _renderer(self) -> PromptRenderer:
        return PromptRenderer(self._data, self._tokenizer)

    @cached_property
    def _most_tokens(self) -> Callable[[str], float]:
        return most_tokens(self._tokenizer)

    def prompts(
        self, rows: Sequence[Row], notes: Notes, is_exact: bool = True, limit: float = 0
    ) -> list[Prompt | InputError]:
        """Return the prompts of rows, tokenized together; instead of a prompt, the fault of its row.

        Unless it ``is_exact``, a text that certainly has no more than ``limit`` tokens is given none.
        """
        uses_template = self._source is not None and self._renderer.uses_template  # no row is at fault
        rendered: list[RenderedPrompt | InputError] = [caught(partial(self._render, row, notes)) for row in rows]
        texts = {
            place: each.text
            for place, each in enumerate(rendered)
            if isinstance(each, RenderedPrompt)
            and each.token_ids is None
            and self._source is not None
            and (is_exact or self._most_tokens(each.text) > limit)
        }
        ids: dict[int, Sequence[int]] = {}
        if texts:
            read = self._tokenizer(list(texts.values()), add_special_tokens=not uses_template)
            ids = dict(zip(texts, read["input_ids"], strict=True))
        prompts: list[Prompt | InputError] = []
        for place, (row, each) in enumerate(zip(rows, rendered, strict=True)):
            if isinstance(each, InputError):
                prompts.append(each)
                continue
            token_ids = ids.get(place, each.token_ids)
            prompts.append(caught(partial(_prompt, row, each, token_ids, self._columns, notes, self._prompt_set)))
        return prompts

    def _render(self, row: Row, notes: Notes) -> RenderedPrompt:
        value = row.column(self._columns.input, "--input-key")
        return RenderedPrompt("") if self._source is None else self._renderer.render(row, value, notes)

    def prompt(self, row: Row, notes: Notes | None = None) -> Prompt:
        """Return the prompt of a row; raise ``InputError`` if it is malformed."""
        (prompt,) = self.prompts([row], Notes() if notes is None else notes)
        if isinstance(prompt, InputError):
            raise prompt
        return prompt

    def unrendered(self, row: Row) -> Prompt:
        """Return the content of a prompt in its file, without its tokens."""
        value = row.find(self._columns.input)
        label = _label(row, self._columns, Notes())
        metadata = _metadata(row, self._columns.metadata)
        return Prompt(value if isinstance(value, str) else "", (), label, metadata, row.where, self._prompt_set, value)


class RowReader:
    """Reads rows of the user's own source one by one, as ``load_prompts`` reads rows of a file."""

    def __init__(
        self,
        data: DataArguments,
        tokenizer: PreTrainedTokenizerBase,
        *,
        reward: RewardArguments | None = None,
        max_context_len: int | None = None,
    ) -> None:
        """See ``load_prompts``."""
        columns = _Columns(data.input_key, data.label_key, data.metadata_key)
        if reward is not None:
            columns = replace(columns, label_may_be_null=reward.labels_optional, check=reward.check_prompt)
        self._reader = _Reader(data, tokenizer, columns)
        self._limits = (data.rollout_max_prompt_len, None if max_context_len is None else max_context_len - 1)
        self._notes = Notes()  # of all rows

    def __call__(self, columns: Mapping[str, Any], number: int) -> Prompt:
        """Return the prompt of row ``number``.

        Raises:
            InputError: The row is malformed, or longer than a limit: its source chooses the rows.
        """
        row = Row(f"row {number} of --data-source-path", columns)
        notes = Notes()
        prompt = self._reader.prompt(row, notes)
        for limit in self._limits:
            if limit is not None and len(prompt.token_ids) > limit:
                row.refuse(
                    f"the prompt has {len(prompt.token_ids)} tokens, and at most {limit} are allowed; leave it out"
                )
        self._notes.log_new(notes)
        return prompt


@dataclass(frozen=True)
class _Columns:
    """The names of a source's columns."""

    input: str
    label: str | None
    metadata: str
    label_may_be_null: bool = False  # some tasks have no single right answer
    check: Callable[[Prompt], None] = lambda prompt: None

    @property
    def names(self) -> tuple[Any, ...]:
        """The fields without the check."""
        return self.input, self.label, self.metadata, self.label_may_be_null


def _prompt(
    row: Row, rendered: RenderedPrompt, ids: Sequence[int] | None, columns: _Columns, notes: Notes, prompt_set: str
) -> Prompt:
    if ids is not None and not ids:
        row.refuse(f"the tokenizer makes no token of the prompt {rendered.text!r}; correct or remove the row")
    prompt = Prompt(
        rendered.text,
        tuple(ids or ()),
        label=_label(row, columns, notes),
        metadata=_metadata(row, columns.metadata),
        source=row.where,
        prompt_set=prompt_set,
        input=row.find(columns.input),
        tools=rendered.tools,
        images=rendered.images,
    )
    try:
        columns.check(prompt)
    except ValueError as error:
        row.refuse(str(error).replace(f"the prompt {row.where}", "the row"))
    return prompt


def _has_label(row: Row, columns: _Columns) -> bool:
    return columns.label is None or row.find(columns.label) is not None


def _label(row: Row, columns: _Columns, notes: Notes) -> Any:
    if columns.label is None:
        return None
    if columns.label_may_be_null and not _has_label(row, columns):
        notes.add(_NO_LABEL, row.where)
        return None
    label = row.column(columns.label, "--label-key")
    if isinstance(label, list) and label:  # alternatives
        return [_value(row, part, columns) for part in label]
    label = _value(row, label, columns)
    if isinstance(label, bool) or (isinstance(label, str) and not label.strip()):
        notes.add(_BOOLEAN_LABEL if isinstance(label, bool) else _BLANK_LABEL, row.where)
    return label


def _value(row: Row, label: Any, columns: _Columns) -> str | int | float:
    if not isinstance(label, str | Real | Decimal):
        row.refuse(
            f"the label, column {columns.label!r}, is of type {type(label).__name__}; give text, a number or a list of "
            f"right answers, and put anything else into the column of --metadata-key"
        )
    if not isinstance(label, str | int) and not math.isfinite(label):  # no float holds some whole numbers
        row.refuse(f"the label, column {columns.label!r}, is {label}; give a finite number or text")
    if isinstance(label, str | int | float):
        return label
    text = plain_number(label)  # of a Decimal or a number of numpy
    number: int | float = float(text) if "." in text else int(text)
    return number if plain_number(number) == text else text


def _metadata(row: Row, key: str) -> dict[str, Any]:
    metadata = row.find(key)
    if metadata is None:  # Parquet stores null if a row has no value
        return {}
    if not isinstance(metadata, dict):
        row.refuse(
            f"column {key!r} is of type {type(metadata).__name__}; it must be an object: correct it, or choose another "
            f"column with --metadata-key"
        )
    return metadata


def _limit(limit: int | None, max_context_len: int | None) -> tuple[str, float]:
    """Return the flag that limits prompts, with its value, and the most tokens of one."""
    if max_context_len is not None and (limit is None or limit >= max_context_len):
        return f"--rollout-max-context-len {max_context_len}", max_context_len - 1
    return f"--rollout-max-prompt-len {limit}", math.inf if limit is None else limit


def _log_long(source: str, verdict: RowsVerdict, flag: str, limit: float) -> None:
    if not verdict.usable:
        raise FlagError(
            f"{flag}: drops all {verdict.rows} prompts of {source}; the shortest has {verdict.shortest} tokens; raise "
            "the limit"
        )
    if verdict.dropped:
        _logger.warning(
            "%s: dropped %d of %d prompts of more than %d tokens (%s); the first is %s",
            source,
            verdict.dropped,
            verdict.rows,
            limit,
            flag,
            verdict.first_long,
        )
    _logger.info("%s: %d prompts", source, len(verdict.usable))
