"""Rewards that compare text: what counts as the answer, and that nobody gains by flooding it."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.tasks.rewards.answer_text import last_code_block
from miles.tasks.rewards.built_in import REWARDS
from miles.tasks.rewards.built_in.dapo import plain_value
from miles.tasks.rewards.built_in.f1 import f1
from miles.tasks.rewards.built_in.format import has_format
from miles.tasks.rewards.built_in.gpqa import chosen_letter
from miles.tasks.rewards.built_in.penalties.overlong import overlong_penalty
from miles.tasks.rewards.built_in.penalties.repetition import repeated_share

anything = st.text(st.sampled_from("ABCD answeris():,.\n*$\\boxed{}<>/think0123"), max_size=200)


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("2+2.\nAnswer: 4", "4", 1),
        ("**Answer:** $\\boxed{1,234}$.", "1234", 1),
        ("Answer: $x = 12$", 12, 1),
        ("Answer: 012.0", "12", 1),
        ("Answer: $\\dfrac{1}{2}$", "\\frac{1}{2}", 1),
        ("Answer: 5\nno, Answer: 6", "6", 1),
        ("Answer: 6\nno, Answer: 5", "6", -1),
        ("Answer: 5 or 6", "6", -1),
        ("Answer: \N{MINUS SIGN}6", "-6", 1),
        ("Answer: \N{MINUS SIGN}6", "6", -1),
        ("Answer: \\(6\\).", "6", 1),
        ("**Answer:** \\[x = 6\\]", "6", 1),
        ("Answer: \\$6", "6", 1),
        ("Answer: \\(5\\), \\(6\\)", "6", -1),
        ("\\boxed{6}", "6", -1),  # not in the form that the prompt asks for
        ("Answer:\n6", "6", 1),
        ("**Answer:**\n\n$6$\n", "6", 1),
        ("Answer: 6\nAnswer:\n\n", "6", 1),
        ("Answer:\nno idea\n6", "6", -1),
        ("Answer: $1{,}234$", "1234", 1),
        ("Answer: 1\\,234", 1234.0, 1),
        ("Answer: 1\N{THIN SPACE}234", "1{,}234", 1),
        ("Answer: the sum is $34$.", "34", 1),
        ("Answer: $5$ or $6$", "6", -1),
        ("Answer: $x$ = 6", "6", 1),
        ("Answer: $\\frac12$", "\\frac{1}{2}", 1),
        ("Answer: $2\\sqrt3$", "2\\sqrt{3}", 1),
        ("Answer: 12 cm", "12", 1),
        ("Answer: $12\\text{ square units}$", "12", 1),
        ("Answer: $12\\text{ cm}^2$", "12", 1),
        ("Answer: $12\\text{ m}$", "12", 1),
        ("Answer: $12\\mathrm{th}$", "12", 1),
        ('Answer: "12"', "12", 1),
        ("Answer: 12 apples", "12", -1),
        ("Answer: 6" + " " * 300, "6", -1),  # only the last 300 characters count
        ("Answer:", "6", -1),
        ("", "6", -1),
    ],
)
def test_dapo_scores_the_last_answer_line(make_sample, response, label, reward):
    assert REWARDS["dapo"]([make_sample(response, label)]) == [reward]


@given(st.integers(-(10**12), 10**12))
def test_dapo_reads_a_whole_number_in_every_spelling(number):
    spellings = {f"{number}", f"{number:,}", f"${number}$", f"\\boxed{{{number}}}", f"x = {number}.", f" {number}.0 "}
    assert {plain_value(text) for text in spellings} == {str(number)}


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("(B) because of C", "B"),
        ("B. Boron", "B"),
        ("The correct answer is **(C)**.", "C"),
        ("Answer: A\nOn reflection, Answer: D", "D"),
        ("<think>Answer: A</think> It is \\boxed{\\text{B}}", "B"),
        ("Answer: B <answer>C</answer>", "C"),
        ("the right choice is option D", "D"),
        ("The answer is B, because option A is wrong.", "B"),
        ("So the answer is B.\nOption C was close.", "B"),
        ("The answer I choose is B.", "B"),
        ("The answer is B, I think", "B"),
        ('The answer is "B".', "B"),
        ("The answer is 'B'.", "B"),
        ("\\boxed{\\text{Option B}}", "B"),
        ("The answer is therefore B", "B"),
        ("So option B is correct.", "B"),
        ("The answer is A, because option B is wrong", "A"),
        ("<answer>The answer is (B)</answer>", "B"),
        ("\\boxed{\\textrm{C}}", "C"),
        ("\\fbox{C}", "C"),
        ("\\boxed {C}", "C"),
        ("Answer\N{FULLWIDTH COLON}B", "B"),
        ("The answer would be (B).", "B"),
        ("## Answer\n\n**B) 42**\n", "B"),
        ("**Final Answer**\nA particle", None),
        ("Among these, B is the correct answer.", "B"),
        ("\\boxed{B\\text{. Boron}}", "B"),
        ("Answer: b", "B"),
        ("(c)", "C"),
        ("\\boxed{d}", "D"),
        ("Answer: a, b", None),
        ("The answer is a cat", None),
        ("Answer: A B C D", None),
        ("Answer: A (or B)", None),
        ("Answer: B. A larger force follows", "B"),
        ("The answer is E", None),  # there are four choices
        ("Option C was close.", None),
        ("Answer: A, B, C, D", None),
        ("The answer is A or B", None),
        ("\\boxed{A, B}", None),
        ("<answer>A/B</answer>", None),
        ("The answer is a mess", None),
        ("A quick thing", None),
        ("Boron", None),
        ("A\nB\nC\nD", None),
        ("A. 5\nB. 6", None),
        ("B\n\nExplanation:\nA) is wrong.", "B"),
        ("B. Boron\n\nIt has five protons.", "B"),
        ("Neither A nor B is the correct answer.", None),
        ("Neither A nor C is right, so B is the correct answer.", "B"),
        ("I don't think A is the correct answer.", None),
        ("A or B is the correct answer", None),
        ("Neither option A nor option B is correct.", None),
        ("The answer is D. If the answer is A, then x = 1, which is false.", "D"),
        ("The statement is false.\n**Answer: B**", "B"),
        ("The answer is definitely B", "B"),
        ("The answer is most likely the option (B)", "B"),
        ("THE ANSWER IS B", "B"),
        ('{"reason": "A is wrong", "answer": "C"}', "C"),
        ('{"answer": ["A", "B"]}', None),
        ("\\boxed{\\text{The answer is C}}", "C"),
        ("\\boxed{A} or \\boxed{B}", None),
        ("The answer \\(B\\) is correct.", "B"),
        ("Answer: <B>", "B"),
        ("The answer is \N{FULLWIDTH LATIN CAPITAL LETTER B}", "B"),
        ("The answer is A-type", None),
        ("Answer: A - C", None),
        ("Answer: B - A larger force follows", "B"),
        ("The answer is (B)(C)", None),
        ("The answer is A or maybe B", None),
        ("The answer is A, and B.", None),
        ("The answer is A, and B is wrong.", "A"),
        ("Answer: (A) 5 or (B) 6", None),
        ("Answer: (A), as (B) or (C) would need more", "A"),
        ("", None),
    ],
)
def test_gpqa_reads_one_letter(response, letter):
    assert chosen_letter(response) == letter


@pytest.mark.parametrize(
    "text", ["answer is A ", "(A) ", "\nA", "A or ", "option A ", "answer is most ", "neither A nor "]
)
def test_gpqa_takes_linear_time(text):
    began = time.process_time()
    chosen_letter(text * (400_000 // len(text)))
    assert time.process_time() - began < 5


@given(anything)
def test_gpqa_never_accepts_one_response_for_two_letters(make_sample, response):
    rewards = [REWARDS["gpqa"]([make_sample(response, letter)])[0] for letter in "ABCD"]
    assert sum(rewards) <= 1


def test_gpqa_checks_the_label(make_sample):
    with pytest.raises(ValueError, match="'E' of the prompt prompts.jsonl:17 is none of the letters A to D"):
        REWARDS["gpqa"]([make_sample("E", "E")])
    assert REWARDS["gpqa"]([make_sample("E", "(e)", metadata={"choices": list("12345")})]) == [1.0]


def test_f1_is_that_of_squad(make_sample):
    assert f1("The Eiffel Tower, Paris", "eiffel tower!") == pytest.approx(2 * (2 / 3) / (2 / 3 + 1))
    assert f1("", "Paris") == 0
    best = make_sample("<think>Rome</think><answer>New York</answer>", ["Rome", "New York City"])
    assert REWARDS["f1"]([best]) == [pytest.approx(0.8)]


@pytest.mark.parametrize("label", ["A", "the", "%", "C++"])
def test_f1_of_an_answer_without_the_words_of_a_short_label_is_0(make_sample, label):
    """SQuAD's own script drops articles and punctuation, so that nothing is left of these, as of an empty answer."""
    answers = [label, label.lower() + " ", "", "...", "an", "?", "the <think>" if label == "A" else "a"]
    assert REWARDS["f1"]([make_sample(answer, label) for answer in answers]) == [1, 1, 0, 0, 0, 0, 0]


@given(st.lists(st.sampled_from(["paris", "rome", "oslo", "the"]), max_size=8), st.integers(2, 50))
def test_f1_gains_nothing_by_repetition(words, times):
    answer, label = " ".join(words), "rome oslo"
    once = " ".join(dict.fromkeys(words))
    assert 0 <= f1(answer, label) <= 1
    assert f1(" ".join([once] * times), label) <= f1(once, label)


@pytest.mark.parametrize(
    ("response", "good"),
    [
        ("<think>a</think><answer>b</answer>", True),
        (" a </think>\n<answer>b</answer>\n", True),  # the prompt has opened the thought
        ("<think>a</think> so <answer>b</answer>", False),
        ("<think>a</think><answer>b</answer> bye", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("<think>a<think>b</think><answer>c</answer>", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think></think><answer>b</answer>", False),
        ("<think>a</think><answer> </answer>", False),
        ("", False),
    ],
)
def test_format_asks_for_each_part_once(response, good):
    assert has_format(response) == good


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_repetition_counts_ngrams_that_came_before(tokens, n):
    seen, repeated, total = set(), 0, 0
    for start in range(len(tokens) - n + 1):
        ngram = tuple(tokens[start : start + n])
        repeated, total = repeated + (ngram in seen), total + 1
        seen.add(ngram)
    assert repeated_share(tokens, n) == pytest.approx(repeated / total if total else 0)


@given(st.integers(0, 400), st.integers(1, 200), st.integers(0, 200))
def test_overlong_is_equation_13_of_dapo(tokens, cache, rest):
    limit = cache + rest
    if tokens <= limit - cache:
        expected = 0.0
    elif tokens <= limit:
        expected = ((limit - cache) - tokens) / cache
    else:
        expected = -1.0
    assert overlong_penalty(tokens, limit, cache) == pytest.approx(expected)


def test_the_last_closed_block_of_code_counts():
    text = "```python\na\n```\n```python\nb\n```\n```\nc\n```\n```json\nd\n```\n```python\ncut off"
    assert last_code_block(text, "python") == "b\n" and last_code_block(text, "json") == "d\n"
    assert last_code_block(text, "yaml") == "c\n", "a block without a mark counts if no other does"
    assert last_code_block("```python\ncut\noff", "python") == "cut\noff\n"
    assert last_code_block("<think>```\na\n```</think>", "python") is None
    assert last_code_block("```python\ndraft\nSo:\n```python\na\n```\n", "python") == "a\n"
    assert last_code_block("The code: ```python\na\n```\nIt prints ```7```.", "python") == "a\n"
    assert last_code_block("```python\na\n```</answer>", "python") == "a\n"
    assert last_code_block("```python\na\n``` This works.", "python") == "a\n"
    assert last_code_block("```python\na\nb```\n", "python") == "a\nb"
    assert last_code_block("````python\n```py\n```\n````\n```a```\nUse ```\n", "python", "py") == "```py\n```\n"


@pytest.mark.parametrize("text", ["- ", "`", " ", "1. ", "```python\n", "~~~", "x ```p", ". {", "```py ", "9", "```\n"])
@pytest.mark.parametrize("end", ["", "`", "x"])
def test_blocks_are_read_in_linear_time(text, end):
    began = time.process_time()
    last_code_block(text * (400_000 // len(text)) + end, "python")
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("fence", "is_python"),
    [(f"```{name}", True) for name in ("python", "py", "python3", "py3", "Python", "PYTHON", "python3.11")]
    + [
        (f"```{info}", True)
        for info in (" python", "python \r", "python title=x", "{python}", "{.python #a}", "py:a.py")
    ]
    + [(f"```{name}", False) for name in ("cpp", "c", "text", "output", "pycon", "python-repl", "json", "java")]
    + [("~~~python", True), ("~~~~ py", True), ("`````python", True), ("~~~cpp", False)],
)
@pytest.mark.parametrize("item", ["", "  ", "    ", "\t", "- ", "1. ", "  10) "])
@pytest.mark.parametrize("closed", [True, False])
def test_a_block_is_read_by_the_mark_of_its_fence(fence, is_python, item, closed):
    mark, indent = fence[: 1 + fence.rindex(fence[0])], "".join(c if c.isspace() else " " for c in item)
    program = 'def f():\n    """\n    ```\n    ~~~\n    """\n\n    return 1\n'
    lines = [*program.splitlines(), *[mark] * closed]
    text = f"Text\n{item}{fence}\n" + "".join(indent * bool(line) + line + "\n" for line in lines)
    block = last_code_block(text + "```text\n1\n```\n" * closed, "python", "py")
    assert block is not None and block.rstrip("\n") == program.rstrip("\n") if is_python else block is None
