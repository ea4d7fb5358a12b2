"""Exact match and F1 of answers in words."""

import pytest

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
