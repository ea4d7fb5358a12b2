"""Corpora: accepted documents, and refusals that name file and line."""

import json

import pytest

from tools.search import Search, read_corpus

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
        {"id": "3", "title": 1984, "text": ""},
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
