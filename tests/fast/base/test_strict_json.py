"""JSON from outside is read exactly, or refused in a few words."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.base.strict_json import MAX_DEPTH, StrictJsonError, loads

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(values, st.booleans())
def test_what_json_writes_is_read_exactly(value, ascii_only):
    assert loads(json.dumps(value, ensure_ascii=ascii_only)) == value


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"a": 1', r"not JSON \(Expecting ',' delimiter, column 8\)"),
        ('{\n"a" 1}', "not JSON .* line 2, column 5"),
        ('[{"a": 1, "b": {"c": 2, "c": 2}}]', "the key 'c' is in one object twice"),
        ("[" * 100_000, f"nested more than {MAX_DEPTH} levels"),
        ("[" * 101 + "]" * 101, f"nested more than {MAX_DEPTH} levels"),
        ("1" * 6000, "a number of more than 4300 digits"),
        (r'{"a": ["\ud83d"]}', r"has \\ud83d, half of a surrogate pair"),
        (r'{"\udc00": 1}', r"has \\udc00, half"),
    ],
)
def test_faults(text, fault):
    with pytest.raises(StrictJsonError, match=fault) as caught:
        loads(text)
    assert "\n" not in str(caught.value)


def test_what_is_close_to_a_fault_is_read():
    assert loads(r'["\ud83d\ude00"]') == ["😀"]
    assert loads(json.dumps([[]] * 1000)) == [[]] * 1000
    assert loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)
