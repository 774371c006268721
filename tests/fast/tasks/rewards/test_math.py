import logging

import pytest

from miles.tasks.rewards.built_in import REWARDS
from miles.tasks.rewards.built_in import math as math_module

math = REWARDS["math"]


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"so \boxed{0.5}, not 7", r"\frac{1}{2}", 1.0),
        ("The answer is $x^2 + 2x + 1$.", "(x+1)^2", 1.0),
        ("it is 42.", 42, 1.0),
        ("it is 43.", "42", 0.0),
        ("it is \N{MINUS SIGN}42.", "-42", 1.0),
        ("it is \N{MINUS SIGN}42.", "42", 0.0),
        (r"\boxed{42}", "\N{MINUS SIGN}42", 0.0),
        ("I cannot tell.", "42", 0.0),
        ("", r"\boxed{42}", 0.0),
    ],
)
def test_equality_is_mathematical(make_sample, response, label, reward):
    assert math([make_sample(response, label)]) == [reward]


SAME = [
    ("\\frac{1}{3}", "0.\\overline{3}", "0.\\bar3", "0.(3)", "0.333\\ldots", "0.333333"),
    ("1/7", "0.\\overline{142857}", "0.\\dot{1}4285\\dot{7}", "0.142857142857..."),
    (
        "1234567",
        "1{,}234{,}567",
        "1\\,234\\,567",
        "1,\\!234,\\!567",
        "1 234 567",
        "1\N{THIN SPACE}234\N{THIN SPACE}567",
    ),
    ("18.9", "\\$18.90", "$18.90", "€18.90", "18.90 \\text{ dollars}", "18.90 dollars", "USD 18.90", "18.90."),
    ("-1234.5", "-\\$1,234.50", "$-1,234.50", "-1\\,234.5"),
    ("1.6e-19", "1.6\\times 10^{-19}", "1.6 x 10^-19", "1.6×10⁻¹⁹", "1.6E-19", "0.00000000000000000016"),
    ("10000000000000000", "1e16", "10^{16}"),
    ("50\\%", "50", "0.5", "50%", "50 percent"),
    ("7", "7.", "7,", "7\\,.", "\\text{7.}", "007"),
    ("\\text{Yes}", "yes", "Yes.", "Yes!"),
    ("xy", "yx", "x \\cdot y"),
    ("120", "5!"),
    ("1,2,\\ldots,n", "1, 2, \\dots, n", "1,2,...,n"),
    ("(1,2]", "1 < x \\le 2", "2 \\ge x > 1", "x \\in (1,2]", "\\{x \\mid 1 < x \\le 2\\}"),
    ("(-\\infty,1)\\cup(2,\\infty)", "x<1 \\text{ or } x>2", "x > 2 or x < 1"),
    ("\\sqrt{2}\\cdot 10^{6}", "1414213.56"),
    ("7/3", "2\\frac{1}{3}", "2 1/3", "2⅓"),
    ("i", "\\sqrt{-1}", "e^{i\\pi/2}", "z = i"),
    ("-1", "i^2", "e^{i\\pi}"),
    ("3+4i", "4i+3", "3+4\\sqrt{-1}"),
    ("i > 3", "3 < i", "(3,\\infty)"),
    ("1500000", "1.5\\text{ million}", "1.5 million", "\\$1.5 \\text{ million dollars}", "1{,}500 thousand"),
    ("9\\text{ m/s}", "9\\frac{\\text{m}}{\\text{s}}", "9\\,\\frac{\\mathrm{m}}{\\mathrm{s}^2}"),
    ("\\frac{GM}{r}", "GM/r", "\\frac{G M}{r}"),
    ("e^{-t/RC}", "e^{-\\frac{t}{RC}}"),
    ("\\overrightarrow{AB}", "\\vec{AB}"),
    ("AB\\parallel CD", "AB \\parallel CD"),
    ("100, 200", "100,\\ 200", "100,\\,200"),
    ("n\\equiv 3\\pmod{7}", "n \\equiv 3 \\pmod 7"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\mathbf{v}=\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("5", "\\text{\\boxed{5}}", "\\text{The answer is } 5.", "\\boldsymbol{5}", "\\color{blue}{5}", "5\\,{\\rm cm}"),
    (
        "5",
        "\\text{5 cm}",
        "\\textbf{5}\\text{ cm}",
        "5~\\mathrm{m/s^2}",
        "5 km/h",
        "5 m^2",
        "5 cm²",
        "5 K",
        "5\\,\\Omega",
    ),
    ("1+\\mathrm{i}", "1+i"),
    ("1-\\frac{1}{\\mathrm e}", "1-\\frac1e"),
    ("\\frac{1\\pm\\sqrt5}{2}", "x=\\frac{1 \\pm \\sqrt{5}}{2}", "\\frac{1+\\sqrt5}{2},\\frac{1-\\sqrt5}{2}"),
    ("16\\frac{2}{3}\\%", "\\frac{50}{3}\\%", "\\frac16"),
    ("0.2", "20\\text{ percent}", "20\\%"),
    ("20^\\circ C", "20°C", "20^\\circ\\text{C}", "20"),
    ("4^\\circ 30'", "4.5^\\circ"),
    ("9:05 \\text{ a.m.}", "9{:}05\\text{ AM}", "\\text{9:05 a.m.}"),
    ("x > 5", "> 5"),
    ("\\text{June 20}", "June 20"),
    ("E_0/c", "\\frac{E_{0}}{c}"),
    ("\\sqrt2", "√2"),
    ("-3", "–3", "-３"),
    ("\\sin 30^\\circ", "\\frac12"),
    ("\\sin^2 20^\\circ", "(\\sin 20^\\circ)^2"),
    ("\\frac{1}{\\sin 18^\\circ}", "\\csc 18^\\circ"),
    ("D", "D)", "\\text{Option D}", "\\text{Answer: D}", "\\mathsf{D}"),
    ("5\\text{ cm}", "5\\,\\text{cm}", "5\\ \\mathrm{cm}", "5 cm"),
    ("10\\%", "10\\,\\%"),
    ("30^\\circ", "30\\degree", "30^\\degree", "30°"),
    ("\\emptyset", "\\varnothing"),
    ("\\sqrt[3]{2}", "\\sqrt[3]2"),
    ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"),
    ("Monday and Tuesday", "\\text{Tuesday}, \\text{Monday}", "\\text{Tuesday and Monday}"),
    ("A, C", "\\text{(A), (C)}", "\\text{A and C}"),
    (
        "3",
        "\\textcolor{red}{3}",
        "\\mathtt{3}",
        "\\ensuremath{3}",
        "\\large 3",
        "\\rm 3",
        "=3",
        "\\approx 3",
        "3\\checkmark",
    ),
    ("3", "٣", "३", "３", "ｘ＝３", "3^{\\text{rd}}", "\\lg 1000", "3\\text{rd}"),
    ("5", "The answer is 5", "Total: 5", "\\text{Area} = 5\\text{ cm}^2", "\\det A=5", "\\therefore 5"),
    ("\\frac{3}{4}", "\\nicefrac{3}{4}", "\\sfrac34", "7５％", "3:4", "3\\colon 4"),
    ("\\frac{\\pi}{6}", "\\frac\\pi6", "\\frac{1}{6}\\pi", "\\arcsin\\frac12"),
    ("\\frac{1}{\\sqrt{\\pi}}", "\\frac{1}{\\sqrt\\pi}", "\\pi^{-1/2}"),
    ("2\\sqrt{3}", "2 * sqrt(3)", "2\\cdot 3^\\frac12"),
    ("x^{10}", "x**10"),
    ("(1,2)", "\\langle 1,2\\rangle", "\\big(1,2\\bigr)", "（1，2）"),
    ("\\{1,2,3\\}", "\\lbrace 3,2,1\\rbrace"),
    ("\\mathbb{R}", "\\mathbb R", "ℝ", "(-\\infty,\\infty)"),
    ("\\ln 2", "\\log_e 2", "\\log_{e}2"),
    ("1000000", "1.000.000"),
    ("2\\hat{i}-\\hat{j}", "2\\hat i-\\hat j"),
    ("x=1,y=2", "\\begin{cases} x=1\\\\ y=2\\end{cases}", "\\begin{aligned} x&=1\\\\ y&=2\\\\ \\end{aligned}"),
    ("H_2O", "\\text{H}_2\\text{O}", "\\mathrm{H_2O}", "\\ce{H_2O}"),
    ("1:2:3", "2:4:6", "1 : 2 : 3"),
    ("3, 4", "\\text{3 and 4}", "\\text{x = 3, 4}"),
    ("1:\\sqrt3:2", "\\sqrt3:3:2\\sqrt3"),
    ("2024-01-15", "2024-1-15", "\\text{2024-01-15}"),
]
DIFFERENT = [
    ("\\frac{1}{2^{99}}", "\\frac{1}{2^{98}}", "0", "-\\frac{1}{2^{99}}"),
    ("1e-20", "0", "-1e-20", "1.1e-20"),
    ("x+10^{-20}", "x"),
    ("100000000000000000001", "100000000000000000000"),
    ("1234567.89", "1234567.98"),
    ("\\sqrt{2}", "1.41", "\\sqrt{3}", "\\sqrt{2}+10^{-20}"),
    ("BCA", "ACB", "\\text{ACB}"),
    ("no", "on", "\\text{on}"),
    ("1, BCA", "1, ACB"),
    ("IV", "VI"),
    ("n!", "n"),
    ("1,2,\\ldots,n", "1,3,\\ldots,n", "1,2,n"),
    ("(1,2)", "1 \\le x < 2", "(1,2]", "(2,1)"),
    ("x>1", "y>1"),
    ("\\infty", "-\\infty"),
    ("i", "-i", "1"),
    ("\\frac{GM}{r}", "\\frac{RT}{r}", "\\frac{GM}{r^2}"),
    ("2AB", "2CD"),
    ("\\overrightarrow{AB}", "\\overrightarrow{BA}", "2\\overrightarrow{AB}"),
    ("\\triangle ABC", "\\triangle DEF"),
    ("S_{ABC}", "S_{ABF}"),
    ("A: 3, B: 4", "A: 4, B: 3"),
    ("100200", "100,\\ 200"),
    ("12", "1 2", "1\\,2", "5\\quad 7"),
    ("3-2\\mathrm{i}", "1", "4-3\\mathrm{i}"),
    ("\\frac{1\\pm\\sqrt5}{2}", "\\frac{1+\\sqrt5}{2}"),
    ("16\\frac{2}{3}\\%", "66\\frac{2}{3}\\%", "\\frac23"),
    ("5 \\text{ feet } 6 \\text{ inches}", "5 \\text{ feet } 7 \\text{ inches}", "5"),
    ("9:05 \\text{ a.m.}", "9:05 \\text{ p.m.}"),
    ("2516_8", "2516_7"),
    ("A", "(A)(B)", "(A)^{-1}", "C. and D."),
    ("A. 5", "A. 6"),
    ("(a)(b+c)", "(a)(b-c)", "b+c"),
    ("5", "\\text{5 hours 20 minutes}", "\\text{5 or 7}", "\\mathrm{5x}"),
    ("\\pm1\\pm\\sqrt2", "1+\\sqrt2,-1-\\sqrt2"),
    ("P(A)=1/2", "P(B)=1/2"),
    ("3\\pmod{7}", "3\\pmod{5}"),
    ("f'(x)=2x", "f(x)=2x"),
    ("5", "> 5", "\\neq 5"),
    ("\\textbf{(B)}\\ 42", "\\textbf{(A)}\\ 42"),
    ("2+3i", "2-3i", "3+2i"),
    ("1500000", "1.5", "1.5\\text{ billion}"),
    ("\\textbf{(B)}\\ 42", "C", "41", "\\textbf{(C)}\\ 41"),
    ("3", "x \\mapsto 3", "A\\to 3", "2\\star 3", "a \\# 3", "\\begin{cases}x=2\\\\y=3\\end{cases}"),
    ("0.5", "x^\\frac12", "2^\\frac12"),
    ("1.2", "\\langle 1,2\\rangle"),
    ("2", "\\log_e 2"),
    ("\\text{Area} = 5\\text{ cm}^2", "\\text{Area} = 6\\text{ cm}^2", "\\text{Volume} = 5\\text{ cm}^2"),
    ("\\text{H}_2\\text{O}", "\\text{H}_2\\text{SO}_4", "\\text{H}_2\\text{O}_2"),
    ("1:2:3", "1:3:2", "1:2:4", "1:2", "1:6"),
    ("1:00:00", "2:00:00"),
    ("\\begin{cases}x & x>0\\\\ 0 & x\\le 0\\end{cases}", "\\begin{cases}x & x>0\\\\ 1 & x\\le 0\\end{cases}"),
    ("2024-01-15", "2024-02-14", "2008"),
    ("1/15/2024", "2/15/2024", "3/45/2024"),
    ("-1<x<1", "-1,1", "\\{-1,1\\}"),
    ("\\text{A and C}", "\\text{A and B}", "A"),
]


def rewards_of_pairs(make_sample, rows):
    pairs = [(one, other) for row in rows for one in row[:1] for other in row] + [
        (b, row[0]) for row in rows for b in row
    ]
    rewards = math([make_sample(f"Not \\boxed{{1}}. So $\\boxed{{{answer}}}$", label) for label, answer in pairs])
    return dict(zip(pairs, rewards, strict=True))


def test_the_spelling_of_a_value_does_not_matter_in_label_or_answer(make_sample):
    assert [pair for pair, reward in rewards_of_pairs(make_sample, SAME).items() if reward != 1] == []


def test_other_values_differ_in_label_and_answer(make_sample):
    rewards = rewards_of_pairs(make_sample, DIFFERENT)
    assert [pair for pair, reward in rewards.items() if reward != (pair[0] == pair[1])] == []


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"One is \boxed{12}, wrong. It is \boxed{17}.", "17", 1),
        (r"One is \boxed{12}, wrong. It is \boxed{17}.", "12", 0),
        (r"\boxed{3} or \boxed{4}", "3, 4", 1),
        (r"\boxed{3} or \boxed{4}", "4", 0),
        (r"$x=\boxed{1}$ and $y=\boxed{2}$", "1, 2", 1),
        (r"\boxed{12} \fbox{\boxed{17}}", "17", 1),
        (r"\boxed{12} and then \boxed{17", "12", 0),  # the answer is cut off
        (r"an empty \boxed{ and \boxed{\{1, 2\}}", "\\{2, 1\\}", 1),
        ("The answer is $42.$", "42", 1),
        ("The answer is 1e-7.", 1e-7, 1),
        ("It costs \\$18.90.", "18.90", 1),
        ("The answer is $ACB$", "BCA", 0),
        (r"\boxed{1}", "x^2+y^2=1", 0),
        (r"\boxed{5}", "The answer is $5$.", 1),
        ("The town has 1.5 million people.", "1500000", 1),
        (r"<think>\boxed{12}</think> The answer is 17.", "17", 1),
        (r"<think>\boxed{12}</think> The answer is 17.", "12", 0),
        (r"\boxed{\textbf{(B)}\ 42}", "B", 1),
        (r"\boxed{\text{(B) }42}", "42", 1),
        (r"\boxed{B. 42}", "(B)", 1),
        (r"\boxed{B}", "\\textbf{(B)}\\ 42", 1),
        (r"\boxed{8\ }", "8", 1),
        ("\\boxed{8\\\\\n}", "8", 1),
        ("<answer>\\frac{1}{2}</answer>", "0.5", 1),
        ("I tried 3. <answer>So the total is 5 apples.</answer>", "5", 1),
        ("<answer>3 or 5</answer>", "5", 0),
        ("\\boxed{6} <answer>5</answer>", "6", 1),
        ("The answer is not 5.", "5", 0),
        ("It is not 4. The answer is 5.", "5", 1),
        ("The answer is 5 or 6.", "5", 0),
        ("The answer is 5 or 6.", "6, 5", 1),
        ("After 5 or 6 steps we get 7.", "7", 1),
    ],
)
def test_the_last_box_is_the_answer(make_sample, response, label, reward):
    assert math([make_sample(response, label)]) == [reward]


@pytest.mark.parametrize("label", ["$$", "\\boxed{}", "\\frac{1}{", "?", "{}"])
def test_a_label_that_states_nothing(make_sample, label):
    with pytest.raises(ValueError, match="prompts.jsonl:17 is not mathematics"):
        math([make_sample("7", label)])


def test_unreadable_label(make_sample):
    with pytest.raises(ValueError, match="prompts.jsonl:17"):
        math([make_sample("7", "  ")])


def test_an_endless_comparison_counts_as_wrong_and_affects_no_other(make_sample, monkeypatch, caplog):
    monkeypatch.setattr(math_module, "SECONDS", 1.0)
    with caplog.at_level(logging.WARNING):
        assert math([make_sample(r"\boxed{9^{9^{9^{9}}}}", "7"), make_sample("7", "7")]) == [0.0, 1.0]
    assert "no verdict (SubprocessCallTimeout: is_equal took more than 1 s), scored 0: prompt prompts" in caplog.text
