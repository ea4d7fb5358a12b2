"""Exact match and F1 of answers in words."""

import json

import pytest

import tasks
from common.turns import Question
from tasks import scores

SAME = [  # (answer, golds), one of which it equals in normal form
    ("the Beatles", ["Beatles"]),
    ("A Beatles", ["The Beatles"]),
    ("Theodore the Great", ["Theodore Great"]),
    ("ZÜRICH", ["Zürich"]),
    ("Zürich", ["Zurich", "Zürich"]),
    ("東京", ["東京"]),
    ("Bo\u00a0Hale", ["Bo Hale"]),  # a non-breaking space
    ("\n Bo\tHale \n", ["Bo Hale"]),
    ("U.S.", ["US"]),
    ("AC/DC", ["ACDC"]),
    ("'The Boss'", ["Springsteen", "The Boss", "Bruce Springsteen"]),
    ("1,000", ["1000"]),
    ("1000.", ["1000"]),
    ("$5", ["5"]),
    ("5%", ["5"]),
    ("no.", ["no"]),
    ("1.5", ["15"]),  # the normal form drops decimal points
]
OTHER = [
    ("theatre", ["atre"]),  # an article is a whole word
    ("Zürich", ["Zurich"]),
    ("Jean-Luc", ["Jean Luc"]),
    ("five", ["5"]),
    ("14 December 1972", ["December 14, 1972"]),
    ("Bo Hale Bo Hale", ["Bo Hale"]),
    ("Bo", ["Bo Hale"]),
    ("yes", ["no"]),
    ("Bo Hale", []),
    ("?", ["!"]),  # both are empty in normal form
    ("the", ["The Who", "the"]),
    ("", [""]),
    (None, ["None"]),
]


@pytest.mark.parametrize("answer, golds", SAME)
def test_case_articles_punctuation_and_spaces_do_not_matter_and_an_alias_is_enough(answer, golds):
    assert scores.exact_match(answer, golds) == scores.f1(answer, golds) == 1.0


@pytest.mark.parametrize("answer, golds", OTHER)
def test_another_word_another_order_or_nothing_is_no_match(answer, golds):
    assert scores.exact_match(answer, golds) == 0.0


@pytest.mark.parametrize(
    "answer, golds, expected",
    [
        ("Bo Hale Bo Hale", ["Bo Hale"], 2 / 3),  # a word counts at most as often as in the gold
        ("Hale Bo", ["Bo Hale"], 1.0),  # in any order
        ("the Bo", ["Bo Hale"], 2 / 3),
        ("1972", ["14 December 1972", "1972"], 1.0),  # the best gold
        ("December 1972", ["14 December 1972", "1972"], 0.8),
        ("Anna", ["Bo Hale"], 0.0),
        ("", ["Bo Hale"], 0.0),
        (None, ["Bo Hale"], 0.0),
        ("the", ["a"], 0.0),
        ("Bo", [], 0.0),
    ],
)
def test_f1_is_the_harmonic_mean_over_words_for_the_best_gold(answer, golds, expected):
    assert scores.f1(answer, golds) == pytest.approx(expected)


FILE_SAME = [  # answers and golds that are equal for a file of one's own
    *(
        ("“The Boss”", "The Boss"),
        ("don’t", "don't"),
        ("«oui»", "oui"),
        ("「東京」", "東京"),
        ("l’été", "l'e\u0301te\u0301"),
    ),
    *(
        ("1990–2000", "1990-2000"),
        ("1990 — 2000", "1990-2000"),
        ("Jean‑Luc", "Jean-Luc"),
        ("\u22125", "-5"),
        ("–5", "-5"),
    ),
    *(("Zu\u0308rich", "Zürich"), ("１２３", "123"), ("٣", "3"), ("٣٫١٤", "3.14"), ("ＡＢＣ", "abc"), ("ﬁsh", "fish")),
    *(
        ("1,000", "1000"),
        ("12,345,678.5", "12345678.5"),
        (".5", "0.5"),
        ("−.5", "-0.5"),
        ("3.14.", "3.14"),
        ("(-5)", "-5"),
    ),
    *(("$5", "5"), ("5%", "5"), ("-$5", "$-5"), ("- 5", "-5"), ("C++.", "c++"), ("the C# language", "C# language")),
    *(("Coca‑Cola™", "Coca-Cola"), ("½", "1/2"), ("1½", "1 1/2"), ("10²", "10^2"), ("H₂O", "H2O"), ("> 5", ">5")),
    *(
        ("U.S.", "US"),
        ("AC/DC", "ACDC"),
        ("COVID–19", "COVID-19"),
        ("so\u00adcial\u200b", "social"),
        ("A", "A"),
        ("5’11", "5'11"),
    ),
]
FILE_OTHER = [
    *(
        ("314", "3.14"),
        ("5", "-5"),
        ("C", "C++"),
        ("C", "C#"),
        ("C11", "C++11"),
        ("A", "A+"),
        ("A-", "A+"),
        ("AB", "AB−"),
    ),
    *(
        ("53", "5/3"),
        ("300", "3:00"),
        ("19902000", "1990-2000"),
        ("52", "5²"),
        ("105", "10^5"),
        ("123", "1,23"),
        ("11/2", "1½"),
    ),
    *(
        ("5", "> 5"),
        ("< 5", "> 5"),
        ("18", "18+"),
        ("5", "- 5"),
        ("5", "$-5"),
        ("5", "--5"),
        ("£5", "$5"),
        ("5", "5‰"),
        ("511", "5'11"),
    ),
    *(
        ("25", "2.5"),
        ("2.5", "2,5"),
        ("m2", "m²"),
        ("five", "5"),
        ("Zurich", "Zürich"),
        ("", "…"),
        ("…", "!"),
        ("5.0", "5"),
    ),
]


@pytest.mark.parametrize("answer, gold", FILE_SAME)
def test_in_a_file_of_ones_own_all_of_unicode_is_read_as_plain_text(answer, gold):
    for one, other in ((answer, gold), (gold, answer)):
        assert scores.exact_match(one, [other], scores.own_form) == scores.f1(one, [other], scores.own_form) == 1.0


@pytest.mark.parametrize("answer, gold", FILE_OTHER)
def test_in_a_file_of_ones_own_numbers_and_names_keep_their_signs(answer, gold):
    for one, other in ((answer, gold), (gold, answer)):
        assert scores.exact_match(one, [other], scores.own_form) == 0.0


def test_the_published_form_changes_nothing_but_composes_accents():
    for answer, golds in SAME:
        assert scores.exact_match(answer, golds)
    assert scores.exact_match("Zu\u0308rich", ["Zürich"]) and scores.exact_match("314", ["3.14"])
    assert not scores.exact_match("“Boss”", ["Boss"]) and not scores.exact_match("１２", ["12"])


@pytest.mark.parametrize("task, published", [("file", False), ("tiny_search", True)])
def test_a_file_of_ones_own_gets_the_careful_form_and_a_named_set_the_published_one(
    tmp_path, make_args, task, published
):
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps({"question": f"What is {i}?", "answers": ["3.14"]}) + "\n" for i in range(9)))
    made = tasks.load(make_args(task=str(path) if task == "file" else task, tools="off"))
    assert made.score("314", Question("1", "?", ["3.14"])) == (float(published), {"f1": float(published)})
    assert made.score("3.14", Question("1", "?", ["3.14"])) == (1.0, {"f1": 1.0})


@pytest.mark.parametrize(
    "answer, gold",
    [("p<0.05", "p>0.05"), ("a<b", "a>b"), ("age>5", "age<5"), ("x=5", "x!=5"), ("1e5", "1e-5"), ("10e-3", "10e3")],
)
def test_relations_and_exponents_change_the_value_on_a_file_of_one_s_own(answer, gold):
    assert scores.exact_match(answer, [gold], scores.own_form) == 0.0
    assert scores.exact_match(answer, [answer.replace("<", " < ")], scores.own_form) == 1.0
