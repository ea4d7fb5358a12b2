"""Comparison of answers by value."""

import pytest

from tasks import equality

NUMBERS = [  # answer, gold, whether it is right
    ("7", "7", True),
    ("7", "-7", False),
    ("+7", "7", True),
    ("007", "7", True),
    ("7.0", "7", True),
    ("7.50", "7.5", True),
    (".5", "0.5", True),
    ("5.", "5", True),
    ("\u22127", "-7", True),  # the Unicode minus
    ("- 7", "-7", True),
    ("1,234,567", "1234567", True),
    ("1,23", "123", False),
    ("12,34", "1234", False),
    ("1{,}000", "1000", True),
    ("1/2", "0.5", True),
    ("2/4", "1/2", True),
    ("-1/2", "-0.5", True),
    ("1/3", "0.333", False),
    ("0.3333333333", "1/3", False),
    ("0.1", "0.10000000001", False),
    ("12345678901234567890", "12345678901234567891", False),
    ("1 1/2", "1.5", True),
    ("-1 1/2", "-3/2", True),
    ("1 000", "1000", False),
    ("1/0", "1", False),
    ("1e3", "1000", True),
    ("2.5E-2", "0.025", True),
    ("1.5 \\times 10^{3}", "1500", True),
    ("1.5 × 10^-1", "0.15", True),
]
PERCENT = [
    ("50%", "50", True),
    ("50\\%", "50%", True),
    ("50 percent", "50%", True),
    ("50%", "0.5", True),
    ("1/2", "50%", True),
    ("50%", "0.5%", False),
    ("50%", "5000", False),
]
UNITS = [
    ("12 cm", "12", True),
    ("12", "12 apples", True),
    ("12\\text{ cm}", "12 cm", True),
    ("12 apple", "12 apples", True),
    ("12 cm", "12 mm", False),
    ("12\\text{ cm}^2", "12", True),
    ("12 cm^2", "12 cm", False),
    ("12 cm^2", "12 cm^3", False),
    ("12 km", "12 m", False),
    ("10 inches", "10\\text{ inch}", True),
    ("3 boxes", "3 box", True),
    ("6 feet", "6 ft", True),
    ("5 hrs", "5 \\text{ hours}", True),
    ("12 km", "12 kilometers", True),
    ("12 square feet", "12 ft^2", True),
    ("12 m²", "12\\text{ sq m}", True),
    ("90 degrees", "90^\\circ", True),
    ("25 mph", "25 \\text{ miles per hour}", True),
    ("60 km/h", "60", True),
    ("60 km/h", "60 kilometers per hour", True),
    ("60 km/h", "60 mph", False),
    ("5 m/s", "5 m/s^2", False),
    ("5/m", "5", False),
    ("3 square meters", "3", True),
    ("$5", "5", True),
    ("\\$18.90", "18.9", True),
    ("-$5", "-5", True),
    ("90^\\circ", "90", True),
    ("90°", "90^{\\circ}", True),
    ("12 million", "12", False),
    ("2 pi", "2", False),
    ("3 or 4", "3", False),
]
DRESSED = [
    ("\\boxed{42}", "42", True),
    ("It is \\boxed{1}, no, \\boxed{2}.", "2", True),
    ("It is \\boxed{1}, no, \\boxed{2}.", "1", False),
    ("\\boxed{\\frac{1}{2}}", "0.5", True),
    ("\\boxed{\\frac{\\sqrt{3}}{2}}", "\\sqrt{3}/2", True),
    ("7", "\\boxed{7}", True),
    ("$7$", "7", True),
    ("$$7$$", "7", True),
    ("\\(7\\)", "7", True),
    ("\\[ 7 \\]", "7", True),
    ("7.", "7", True),
    ("$\\frac12$", "1/2", True),
    ("\\dfrac{3}{4}", "0.75", True),
    ("-\\frac{1}{2}", "-0.5", True),
    ("1\\frac{1}{2}", "3/2", True),
    ("\\text{yes}", "yes", True),
]
IN_DOLLARS = [  # the text around them counts, unless it only introduces the answer
    ("The answer is: $x^2+1$", "1+x^2", True),
    ("**Answer:** $5$", "5", True),
    ("Answer $5$", "5", True),
    ("Thus, we find that $x \\lt 3$.", "x < 3", True),
    ("The answer is \\(5\\).", "5", True),
    ("The answer is $5$ cm.", "5", True),
    ("The answer is $\\sqrt{3}$ cm.", "\\sqrt{3}", True),
    ("$5$ cm", "5 mm", False),
    ("x = $5$", "5", True),
    ("x+y = $5$", "5", False),
    ("-$5$", "-5", True),
    ("-$5$", "5", False),
    ("$5$/2", "5/2", True),
    ("$5$/2", "5", False),
    ("$5$%", "0.05", True),
    ("$5$!", "5", False),
    ("3 + $5$", "5", False),
    ("3:$5$", "5", False),
    ("2$x$", "x", False),
    ("$5$ million", "5", False),
    ("less than $5$", "5", False),
    ("$3$ hours and 20 minutes", "3", False),
    ("$6$ is wrong; it is 5", "6", False),
    ("It is $6$. No, it is $5$.", "6", False),
    ("$5, $6", "5", False),
    ("\\$5 and \\$6", "6", False),
    ("$\\$32,348$", "32348", True),
    ("$5$ and $6$", "5,6", True),
    ("$5$ and $6$", "6", False),
    ("5 and", "5", False),
    ("$2\\sqrt{3}$ units", "2\\sqrt{3}\\text{ units}", True),
    ("\\frac{\\pi}{2}\\text{ cm}", "\\frac{\\pi}{2}", True),
    ("\\frac{\\pi}{2} cm^2", "\\frac{\\pi}{2}", True),
    ("$\\frac12$, $3$", "\\frac{1}{2},3", True),
]
FORMULAS = [
    ("x^2+1", "1+x^2", True),
    ("x^2+1", "x^2-1", False),
    ("\\frac{\\sqrt{2}}{2}", "1/\\sqrt{2}", True),
    ("2", "\\sqrt{4}", True),
    ("1024", "2^{10}", True),
    ("\\pi", "3.14", False),
    ("x=5", "5", True),
    ("4x", "4", False),
    ("(1,2)", "(1, 2)", True),
    ("(1,2)", "(2,1)", False),
    ("\\{1,2\\}", "\\{2,1\\}", True),
    ("\\left(3, \\frac{\\pi}{2}\\right)", "(3,\\pi/2)", True),
    ("The answer is $5$.", "5", True),
    ("3 or 4", "4", False),
    ("1 2 3 4 5", "5", False),
    ("25", "12+13", True),
    ("x^2+y^2", "y^2+x^2", True),
    ("x^2-y^2", "y^2+x^2", False),
    ("x^3+3x^2-6x-8", "x^3 + 3x^2 - 6x - 8", True),
    ("(x+y)(x-y)", "x^2-y^2", True),
    ("a^2b^2", "b^2a^2", True),
    ("x^{2}+x^{3}", "x^2+x^3", True),
    ("x^2+y^2=1", "x^2 + y^2 = 1", True),
    ("x^2+y^2=1", "x^2+y^2=2", False),
    ("75^\\circ", "30^\\circ+45^\\circ", True),
]
PRODUCTS = [  # of variables, which look like words
    ("xy+1", "xy + 1", True),
    ("1+xy", "xy+1", True),
    ("x*y + 1", "xy+1", True),
    ("xy+2", "xy+1", False),
    ("ab+cd", "ac+bd", False),
    ("\\dfrac{xy}{2}", "\\frac{xy}{2}", True),
    ("\\frac12 bh", "\\frac{bh}{2}", True),
    ("\\frac12", "\\frac12 bh", False),
    ("10", "10 ab", False),
    ("6 or 2", "3 or 4", False),
    ("4 to 3", "3 to 4", False),
    ("6 lb 5 oz", "5 lb 6 oz", False),
    ("9 pm", "9 am", False),
]
AS_PYTHON_PRINTS = [
    ("pi", "\\pi", True),
    ("pi", "3", False),
    ("pi/2", "\\frac{\\pi}{2}", True),
    ("3*pi", "3\\pi", True),
    ("1024", "2**10", True),
    ("x**2+1", "x^2+1", True),
    ("x**10", "x^{10}", True),
    ("x**2*y**3", "x^2y^3", True),
    ("2**(1/2)", "\\sqrt{2}", True),
    ("2√3", "2\\sqrt{3}", True),
    ("√(5)", "\\sqrt{5}", True),
    ("x <= 5", "x \\le 5", True),
    ("x >= 5", "x \\le 5", False),
]
SIDES = [  # of an equation that only names the answer, and of an inequality
    ("f(x) = x^2", "x^2", True),
    ("P(A) = \\frac12", "0.5", True),
    ("sin(x) = 1", "1", False),
    ("a_1 = 5", "5", True),
    ("S_{10} = 5", "5", True),
    ("\\theta = 30", "30", True),
    ("x=5, x=6", "5,6", True),
    ("$x=5$ and $x=6$", "5, 6", True),
    ("1,2", "x=1, x=2", True),
    ("x=1,y=2", "x=1, y=2", True),
    ("x=1,y=2", "x=2, y=1", False),
    ("x+y = 5", "5", False),
    ("2x = 5", "5", False),
    ("> 5", "5", False),
    ("5", "> 5", False),
    ("\\ge 5", "5", False),
    ("5?", "5", False),
    ("5...", "5", False),
    ("5 \\le x", "x \\geq 5", True),
    ("x < 5", "x > 5", False),
    ("(5,\\infty)", "x>5", True),
]
JUNK = [
    "",
    " ",
    None,
    "abc",
    "{{{",
    "\\boxed{",
    "\\frac",
    "$",
    "$$",
    "%",
    "\x00",
    "\ud83d",
    "9" * 5000,
    "1e999999999",
    "\\",
]


@pytest.mark.parametrize(
    "answer, gold, right",
    [*NUMBERS, *PERCENT, *UNITS, *DRESSED, *IN_DOLLARS, *FORMULAS, *PRODUCTS, *AS_PYTHON_PRINTS, *SIDES],
)
def test_answers_are_compared_by_value(answer, gold, right):
    assert equality.equal(answer, [gold]) is right


@pytest.mark.parametrize("answer, gold, right", NUMBERS + PERCENT)
def test_equality_is_symmetric(answer, gold, right):
    assert equality.equal(gold, [answer]) is right


@pytest.mark.parametrize("answer", JUNK)
def test_junk_is_wrong_and_raises_nothing(answer):
    assert equality.equal(answer, ["1", "x^2"]) is False


def test_one_of_several_golds_is_enough():
    assert equality.equal("0.5", ["3", "x", "1/2"]) and not equality.equal("0.5", ["3", "x"])
    assert not equality.equal("1", [])


def test_a_number_needs_no_worker(monkeypatch):
    monkeypatch.setattr(equality.POOL, "ask", None)  # it would raise
    assert equality.equal("1,000", ["10^3", "1e3"]) and not equality.equal("0.333", ["1/3"])
    assert equality.equal("x+1", ["x+1"])


@pytest.mark.parametrize("tower", ["10^{10^{10}}", "9^{9^{9}}", "2**3**4", "10^(10^10)", "10**(10**10)", "x^{2}^{3}"])
def test_a_tower_of_powers_never_reaches_the_worker(monkeypatch, tower):
    monkeypatch.setattr(equality.POOL, "ask", None)  # it would raise
    assert not equality.equal(tower, ["\\sqrt{3}"]) and not equality.equal("\\sqrt{3}", [tower])


@pytest.mark.parametrize(
    "answer, gold",
    [
        *[
            ("5²", "5"),
            ("2³", "2"),
            ("4 xy", "4"),
            ("10 ab", "10"),
            ("2 alpha", "2"),
            ("2 thirds", "2"),
            ("3 quarters", "3"),
        ],
        *[
            ("5 hundredths", "5"),
            ("3 millions", "3"),
            ("2 dozens", "2"),
            ("2 bn", "2"),
            ("3 factorial", "3"),
            ("5^", "5"),
        ],
        *[("2 root three", "2"), ("7 mod three", "7"), ("10 base two", "10"), ("6 less two", "6"), ("3 is wrong", "3")],
        *[("on", "no"), ("sey", "yes"), ("ABC", "CAB"), ("$5$ $6$", "6"), ("$4$ or $5$", "5"), ("not $5$", "5")],
        *[("the answer is not 5", "5"), ("(0.6666667)", "2/3"), ("{0.3333333}", "1/3"), ("3.141593", "\\pi")],
        *[("x^2=25", "25"), ("x^2=5", "5"), ("2+2=5", "5"), ("10^{10^{10}}", "1"), ("9^{9^{9^{9}}}", "5")],
    ],
)
def test_answers_that_only_look_like_the_gold_are_wrong(answer, gold):
    assert not equality.equal(answer, [gold])


@pytest.mark.parametrize(
    "answer, gold",
    [
        *[("25", "5²"), ("x = 5", "5"), ("(5)", "5"), ("12 cm^2", "12"), ("12 square cm", "12"), ("3 apples", "3")],
        *[("$x^2+1$", "1+x^2"), ("\\sin(x)", "\\sin x"), ("x = 2+y", "2+y"), ("A", "A")],
    ],
)
def test_answers_that_only_look_different_are_right(answer, gold):
    assert equality.equal(answer, [gold])


AS_DATA_SETS_HAVE_IT = [  # golds in the form of GSM8K, MATH, AIME, AMC, SVAMP and OlympiadBench
    ("25", "025", True),
    ("27", "27.0", True),
    ("2000", "2,000", True),
    ("10000", "10,\\!000", True),
    ("10000", "10\\,000", True),
    ("32348", "\\$32,\\!348", True),
    ("32348", "\\$32,\\! 348", True),
    ("11111111100", "11,\\! 111,\\! 111,\\! 100", True),
    ("11,111,111,100", "11,\\! 111,\\! 111,\\! 100", True),
    ("1, 200", "1,200", False),
    ("10", "10\\%", True),
    ("0.25", "25\\%", True),
    ("25%", "\\frac{1}{4}", True),
    ("−1/2", "-\\frac12", True),
    ("\\frac{2}{-3}", "\\frac{-2}{3}", True),
    ("\\frac 1 2", "\\frac{1}{2}", True),
    ("\\frac{10}{20}", "$\\frac{1}{2}$", True),
    ("4.6667", "\\frac{14}{3}", False),
    ("half", "\\frac{1}{2}", False),
    ("five", "5", False),
    ("1/2 cup", "0.5", True),
    ("12", "12\\text{ square units}", True),
    ("90", "90^\\circ", True),
    ("12\u00a0cm", "12\\text{ cm}", True),  # a non-breaking space
    ("12 cm", "120 mm", False),
    ("3:00 pm", "3", False),
    ("sqrt(117)", "3\\sqrt{13}", True),
    ("11\\sqrt2", "11\\sqrt{2}", True),
    ("\\boxed{\\frac{\\sqrt{3}}{2^{10}}}", "\\frac{\\sqrt{3}}{1024}", True),
    ("So \\boxed{\\left\\{1, 2\\right\\}}", "\\{2,1\\}", True),
    ("\\boxed{\\text{no}}", "no", True),
    ("\\boxed{1} or \\boxed{2}", "1", False),
    ("\\fbox{5}", "5", True),
    ("\\boxed 5", "5", True),
    ("-5i+6", "6 - 5i", True),
    ("q-p", "p - q", False),
    ("x^3 - 6 + 3x", "x^3 + 3x - 6", True),
    ("y = 3x+2", "y=2x+3", False),
    ("(3, \\frac{\\pi}{2})", "\\left( 3, \\frac{\\pi}{2} \\right)", True),
    ("(2,5)", "[2,5)", False),
    ("x \\in [2,5)", "[2,5)", True),
    ("(-\\infty, 3]", "(-\\infty,3]", True),
    ("2516_8", "2516_8", True),
    ("Evelyn", "\\text{Evelyn}", True),
    ("Ada", "\\text{Evelyn}", False),
    ("(C)", "\\text{(C)}", True),
    ("1,-2", "1, -2", True),  # all of several values
    ("1", "1, -2", False),
    ("B", "A", False),
]


@pytest.mark.parametrize("answer, gold, right", AS_DATA_SETS_HAVE_IT)
def test_golds_as_the_data_sets_write_them(answer, gold, right):
    assert equality.equal(answer, [gold]) is right


@pytest.mark.parametrize("answer", ["", " ", "\\boxed{}", "\\boxed{ }", "\\text{}", "."])
def test_an_empty_answer_is_wrong_even_if_a_gold_is_empty_too(answer):
    assert not equality.equal(answer, ["5", "", answer])


@pytest.mark.parametrize(
    "answer, gold, right",
    [
        (r"\begin{pmatrix} -1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}-1\\2\end{pmatrix}", True),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}-1\\2\end{pmatrix}", False),
        ("864 inches^2", r"864 \mbox{ inches}^2", True),
        ("evelyn", r"\text{Evelyn}", True),
        ("evelyn", r"\mbox{Karla}", False),
    ],
)
def test_matrices_text_boxes_and_names_as_math_has_them(answer, gold, right):
    assert equality.equal(answer, [gold]) is right


PARTS = [  # formulas of which math-verify reads a part
    (r"0.\overline{4}", r"0.\overline{7}", False),
    ("0", r"0.\overline{7}", False),
    (r"\frac79", r"0.\overline{7}", True),
    ("7/9", r"0.\bar{7}", True),
    (r"\frac16", r"0.1\overline{6}", True),
    (r"1.2\overline{34}", r"\frac{611}{495}", True),
    (r"2.\overline{9}", "3", True),
    (r"x \equiv 2 \pmod 9", r"x \equiv 5 \pmod 9", False),
    (r"x \equiv 5 \pmod{9}", r"x \equiv 5 \pmod{9}", True),
    ("7", r"7\mathrm{i}", False),
    ("7i", r"7\mathrm{i}", True),
    (r"3+2\mathrm{i}", "3+2i", True),
    (r"3\mathrm{e}^{2}", r"3\mathrm{e}^{5}", False),
    ("3e^2", r"3\mathrm{e}^{2}", True),
    (r"12\text{m}", "12 m", True),  # a unit stays a unit
    (r"\mathbf{x}+1", "1+x", True),
    ("1", r"1:8:27:\ldots", False),
    (r"1:8:27:\ldots", "1", False),
    ("1, 4, 9, ...", "1", False),
    ("1:2", "1:2", True),
    ("1:2", "1", False),
    (r"5\mathbb{Z}", r"5\mathbb{N}", False),
    (r"5\mathbb{Z}", "5", False),
    (r"6\sqrt(5)", "6", False),
    (r"6\sqrt(5)", r"6\sqrt{5}", True),
    (r"\vec{3}", "3", False),
    (r"3\hat{k}", "3", False),
    (r"\underbrace{3}_{x}", "3", False),
    (r"\mathcal{O}(5)", "5", False),
    (r"\angle 40", "40", False),
    ("4;5", "4", False),
    ("1", r"\sum_{j=1}^{m} j", False),
    (r"\sum_{j=1}^{m} j", "1", False),
    (r"\prod_{i=3}^{6} i", r"\prod_{i=3}^{9} i", False),
    (r"x_{1}=5", "5", True),
    (r"x_1 = 5", "5", True),
]
SIZES = [  # very large and very small values
    (r"\frac1{21!}", r"\frac1{20!}", False),
    (r"\frac{1}{2432902008176640000}", r"\frac1{20!}", True),
    ("e^{-45}", "e^{-44}", False),
    (r"\frac{1}{e^{45}}", "e^{-45}", True),
    (r"\frac1{2^{90}}", r"\frac1{2^{91}}", False),
    ("2^{-90}", r"\frac1{2^{90}}", True),
    (r"\sqrt{10^{40}+1}", "10^{20}", False),
    (r"\sqrt{10^{40}}", "10^{20}", True),
    (r"10^{20}+\pi", r"10^{20}+\sqrt{2}", False),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", True),
    ("1.4142135623731", r"\sqrt{2}", True),
    ("1.41421356237", r"\sqrt{2}", False),
    ("3.14", r"\pi", False),
    ("1/0", "2/0", False),
    (r"\infty", r"-\infty", False),
]
MARKDOWN = [
    ("**84**", "84", True),
    ("*84*", "84", True),
    ("__84__", "84", True),
    ("`84`", "84", True),
    ("**Answer:** 84", "84", True),
    ("Final answer: 84", "84", True),
    ("The answer is **84**.", "84", True),
    ("**Yes**", "Yes", True),
    ("**No**", "Yes", False),
    ("**85**", "84", False),
    ("not **84**", "84", False),
    ("**84** or **85**", "84", False),
    ("8", "2**3", True),
    ("2**3", "6", False),
    ("24", "2*3*4", True),
    ("x_1_2", "12", False),
]


@pytest.mark.parametrize("answer, gold, right", PARTS + SIZES + MARKDOWN)
def test_formulas_are_read_whole_or_not_at_all(answer, gold, right):
    assert equality.equal(answer, [gold]) is right


@pytest.mark.parametrize(
    "text, inner",
    [
        ("It is $\\boxed{5}$.", "5"),
        ("\\boxed{1}, no, \\boxed{2}", "2"),
        ("\\boxed{\\frac{\\sqrt{3}}{2^{10}}}, so.", "\\frac{\\sqrt{3}}{2^{10}}"),
        ("\\boxed{\\left\\{1, 2\\right\\}}", "\\left\\{1, 2\\right\\}"),
        ("\\boxed{(0, 1] \\text{ {or} } \\}}", "(0, 1] \\text{ {or} } \\}"),  # an escaped brace closes nothing
        ("\\fbox{ 7 }", "7"),
        ("\\boxed {8}", "8"),
        ("$\\boxed 9$.", "9"),
        ("\\boxed{}", ""),
        ("\\boxed{1", None),
        ("\\boxed", None),
        ("\\boxed $", None),
        ("\\boxed{1} and then \\boxed{2", "1"),  # the last complete box
        ("\\boxed{5}, in \\boxed format", "5"),
        ("nothing", None),
        ("", None),
    ],
)
def test_the_last_box_is_found_whole(text, inner):
    assert equality.boxed(text) == inner
