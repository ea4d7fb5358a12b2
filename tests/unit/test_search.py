"""Corpora: accepted documents, and refusals that name file and line."""

import json

import pytest

from tools.search import Search, plain, read_corpus

ADA = {"id": "1", "title": "Ada", "text": "is tall"}


def write(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def test_a_corpus_may_have_blank_lines_other_types_and_extra_keys(tmp_path):
    path = write(
        tmp_path / "c.jsonl",
        b"\xef\xbb\xbf" + json.dumps(ADA).encode() + b"\r",  # as Windows editors write it
        b"  ",
        {"id": 2, "title": None, "text": "\u2028 é", "more": []},
        b"\xef\xbb\xbf" + json.dumps({"id": "3", "title": 1984, "text": ""}).encode(),  # two files put together
    )
    assert read_corpus(path) == [
        ADA,
        {"id": "2", "title": "", "text": "\u2028 é"},
        {"id": "3", "title": "1984", "text": ""},
    ]


@pytest.mark.parametrize(
    "line, words",
    [
        (b'{"id": "2", "title": "caf\xe9", "text": "x"}', "not UTF-8"),
        (b"\x1f\x8b\x08\x00", "not UTF-8"),
        (b'{"id": "2"', "not a document"),
        (b"[" * 100_000, "not a document"),
        ([ADA], "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'"id title text"', "not a JSON object"),
        ({"id": "2", "title": "x"}, "text is missing"),
        ({"id": None, "title": "x", "text": "y"}, "id is null"),
        ({"id": "2", "title": "x", "text": ["y", "z"]}, r'text is \["y", "z"\], not a string'),
        ({"id": "2", "title": {}, "text": "x"}, "title is {}"),
        ({"id": "2", "title": " ", "text": None}, "title and text are empty"),
        ({"id": 1, "title": "x", "text": "y"}, "id 1 occurs twice"),
    ],
)
def test_a_bad_document_is_named_with_its_line(tmp_path, line, words):
    path = write(tmp_path / "c.jsonl", ADA, b"", line)
    with pytest.raises(ValueError, match=f"line 3: .*{words}") as refused:
        read_corpus(path)
    assert str(refused.value).startswith(str(path)) and "\n" not in str(refused.value)
    assert type(refused.value) is ValueError


def test_a_folder_or_a_missing_file_is_an_os_error(tmp_path):
    for path in (tmp_path, tmp_path / "missing.jsonl"):
        with pytest.raises(OSError):
            Search(path, 1)


def test_a_corpus_without_words_is_refused():
    with pytest.raises(ValueError, match="no word to search for"):
        Search([{"id": "1", "title": "The", "text": "..."}], 1)


def test_a_document_is_one_line_for_the_agent():
    documents = [
        {"id": "1", "title": "Ada\tCole", "text": "tall\nand  old \ud83d"},
        {"id": "2", "title": "", "text": "Ada"},
    ]
    assert Search(documents, 2)("Ada Cole") == "Doc 1 (Title: Ada Cole) tall and old ?\nDoc 2 (Title: ) Ada"


PAGES = [
    {"id": str(i), "title": title, "text": text}
    for i, (title, text) in enumerate(
        [
            ("東京", "東京は日本の首都である。"),
            ("大阪", "大阪は日本の都市である。"),
            ("北京", "北京是中华人民共和国的首都。"),
            ("서울", "서울은 대한민국의 수도이다."),
            ("กรุงเทพ", "กรุงเทพเป็นเมืองหลวง"),
            ("C++", "A language by Bjarne."),
            ("C#", "A language of Microsoft."),
            ("R", "A language for figures."),
            ("U.S. Army", "Soldiers."),
            ("Zürich", "A town."),
            ("Łódź", "A town too."),
            ("Афины", "Город в Греции."),
            ("Αθήνα", "Πόλη."),
            ("हिन्दी", "एक भाषा"),
            ("World War 2", "A war."),
            ("ＦＵＬＬ ｗｉｄｔｈ", "Letters."),
            ("ﬁsh", "An animal."),
            ("plan B", "Another plan."),
        ]
    )
]


@pytest.fixture(scope="module")
def pages():
    return Search(PAGES, 3)


@pytest.mark.parametrize(
    "query, title",
    [
        *((page["title"], page["title"]) for page in PAGES),
        ("日本の首都はどこですか", "東京"),
        ("中华人民共和国的首都是哪里？", "北京"),
        ("대한민국의 수도", "서울"),
        ("Who made c++?", "C++"),
        ("What is R?", "R"),
        ("US army", "U.S. Army"),
        ("u.s.", "U.S. Army"),
        ("zu\u0308rich", "Zürich"),
        ("ZURICH", "Zürich"),
        ("Łodz", "Łódź"),
        ("ΑΘΗΝΑ", "Αθήνα"),
        ("афины", "Афины"),
        ("full width", "ＦＵＬＬ ｗｉｄｔｈ"),
        ("fish", "ﬁsh"),
        ("which is war 2", "World War 2"),
    ],
)
def test_a_query_of_any_script_finds_its_page(pages, query, title):
    assert pages.find(query)[0]["title"] == title


def test_spellings_of_one_text_fall_together():
    assert plain("Zu\u0308rich's U.S. firm") == plain("ZÜRICH\u2019s u.s. FIRM") == "zurich us  firm"
    assert plain("don't R&D e.g. 3.14 Ada's.") == "don r&d eg  3.14 ada."


@pytest.mark.parametrize(
    "text, warning",
    [("Ada is tall", ""), ("東京は日本", ""), ("Город в Греции", "not Latin"), ("مدينة في العراق", "not Latin")],
)
def test_a_corpus_of_another_script_is_announced(capsys, text, warning):
    Search([{"id": "1", "title": text, "text": text}], 1)
    err = capsys.readouterr().err
    assert warning in err and bool(err) == bool(warning)


def test_titles_that_are_not_found_are_announced(capsys):
    Search([{"id": "1", "title": "The", "text": "A word"}, {"id": "2", "title": "!?", "text": "signs"}], 1)
    assert "finds nothing for a title of the corpus, such as 'The'" in capsys.readouterr().err


def test_the_index_depends_on_the_rules_for_tokens(monkeypatch):
    before = Search([ADA], 1).fingerprint
    monkeypatch.setattr("tools.search.TOKENS", 0)
    assert Search([ADA], 1).fingerprint != before
