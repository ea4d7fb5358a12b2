"""The named data sets: their place on the hub, their columns, and the conversion of a row to a Question.

    load("hotpotqa", eval_questions=200, with_documents=True)      # Data: train, held_out, test, documents

`datasets.load_dataset` reads everything. If TURNWISE_DATA names a folder, the data is read from there instead of the
hub: <folder>/<owner>/<name>/<configuration, or default>/<split>.parquet (or .jsonl). docs/data.md lists the data sets
and their splits.
"""

import difflib
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from common import cache, ranks, run
from common.turns import Question
from tasks import equality
from tasks.scores import normal_form, visible

if TYPE_CHECKING:
    import datasets

BATCH = 1000  # rows converted to Python objects at once, to bound memory
NUMBER = (str, int, float)  # answers are text in some copies of a data set and numbers in others
TYPES = {  # type of a column -> its names in Arrow and `datasets`
    str: {"string", "large_string"},
    bool: {"bool"},
    int: {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    float: {"float16", "float32", "float64"},
}


@dataclass(frozen=True)
class Data:
    """A data set in three parts that share no question text. documents: a list of {"id", "title", "text"}, or None."""

    kind: str  # search | math | choice | code
    train: list[Question]
    held_out: list[Question]  # from the train split, for evaluation during training
    test: list[Question]  # for reports
    documents: list[dict] | None


@dataclass(frozen=True)
class Source:
    """A data set of the hub and the way to read it.

    columns: the columns to read, as {name: type}. A type is str, bool, a tuple of alternatives, [type] for a list, or
    {name: type} for a struct. `read` makes a Question from a row (a dict of these columns), or returns None if no
    answer can be right.
    """

    kind: str
    path: str  # owner/name
    columns: dict
    read: Callable[[dict], Question | None]
    test: str  # the split for reports: validation if the answers of the test split are hidden
    train: str | None = None
    config: str | None = None
    gated: bool = False
    paragraphs: tuple[str, Callable] | None = None  # column of documents, function from a cell to [(title, text)]
    apart: tuple[str, ...] = ()  # data sets whose test questions are removed from training


def load(name: str, eval_questions: int, with_documents: bool) -> Data:
    """Load the data set `name`. Without a train split there are test questions only.

    held_out has `eval_questions` questions, but at most a quarter of the train split. Their texts, not their positions,
    decide which. Raises SystemExit if data is missing, cannot be reached, or has an unexpected layout.
    """
    source = source_of(name)
    splits = [split for split in (source.test, source.train) if split]
    tables = [table(name, source, split) for split in splits]
    parts = [read_questions(source, split, rows) for split, rows in zip(splits, tables)]
    if not all(parts):
        raise SystemExit(f"--task {name}: no row of a split has a question and an answer. Is {place(source)} complete?")
    rows, used = sum(map(len, tables)), sum(map(len, parts))
    if used < rows and ranks.rank() == 0:
        run.notice(f"{name}: left out {rows - used} of {rows} rows, which have no question or no usable answer")
    test, train = parts if source.train else (parts[0], [])
    key = KEYS[source.kind]
    keys = {q.id: key(q.text) for q in test + train}
    taken = {keys[q.id] for q in test}
    for other in map(SOURCES.get, source.apart):
        taken |= {key(q.text) for q in read_questions(other, other.test, table(name, other, other.test))}
    train, held_out = split_off([q for q in train if keys[q.id] not in taken], eval_questions, keys)
    documents = documents_of(source, tables) if with_documents and source.paragraphs else None
    return Data(source.kind, train, held_out, test, documents)


def source_of(name: str) -> Source:
    """Return the Source of a name. Raises SystemExit that lists similar names, or all."""
    if name not in SOURCES:
        close = difflib.get_close_matches(name, SOURCES, n=3) or SOURCES
        raise SystemExit(f"--task {name}: no data set of that name. Choose from: {', '.join(close)}.")
    return SOURCES[name]


def split_off(questions: list[Question], count: int, keys: dict[str, str]) -> tuple[list[Question], list[Question]]:
    """Return (train, held-out): a hash of the texts selects `count` different questions, at most a quarter.

    keys: {id: key}; questions with the same key count as the same question.
    """
    first = {}  # key -> the question with the first id
    for question in sorted(questions, key=lambda q: q.id):
        first.setdefault(keys[question.id], question)
    held_out = [first[text] for text in sorted(first, key=digest)][: min(count, len(questions) // 4)]
    taken = {keys[q.id] for q in held_out}
    return [q for q in questions if keys[q.id] not in taken], held_out


def digest(text: str) -> str:
    """Return the SHA-256 of a text in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


# ---- loading from the hub, or from the folder TURNWISE_DATA


def table(name: str, source: Source, split: str) -> "datasets.Dataset":
    """Load the columns of a Source from a split. Raises SystemExit if that fails or a column does not fit.

    One rank of a machine downloads while the others wait.
    """
    import datasets
    from datasets.exceptions import DatasetGenerationError, FileNotFoundDatasetsError

    if ranks.rank():
        datasets.disable_progress_bars()
    where = place(source)
    path, arguments = source.path, {"name": source.config}
    datasets.config.HF_HUB_OFFLINE |= "HF_HUB_OFFLINE" in os.environ
    if folder := os.environ.get("TURNWISE_DATA"):
        path, arguments = local(name, source, split, Path(folder))
    try:
        with cache.locked(cache.cache_dir() / "data" / f"{name}-{split}"):
            rows = datasets.load_dataset(path, split=split, **arguments)
    except FileNotFoundDatasetsError as error:  # missing, gated, private, or without a data file
        page = f"https://huggingface.co/datasets/{source.path}"
        if source.gated or "gated" in str(error):
            advice = f"Accept its licence at {page}, then log in: hf auth login."
        else:
            advice = f"Check whether {page} has moved. A private data set needs: hf auth login."
        raise SystemExit(f"--task {name}: the hub gives no access to {where} ({first_line(error)}). {advice}") from None
    except (ConnectionError, FileNotFoundError) as error:  # no network, HF_HUB_OFFLINE, a hub that is down
        raise SystemExit(unreachable(name, where, error)) from None
    except DatasetGenerationError as error:  # a broken file, a full disk, files of different columns
        raise SystemExit(
            f"--task {name}: {where}, split {split}, cannot be read ({first_line(error.__cause__ or error)}). Is the "
            "file complete, and is there room in the cache (HF_HOME)?"
        ) from None
    except ValueError as error:  # no such configuration or split, or none in the cache of an offline machine
        if "Couldn't find cache" in str(error):
            raise SystemExit(unreachable(name, where, error)) from None
        raise SystemExit(
            f"--task {name}: expected {where} with the split {split}, but found another layout ({first_line(error)}). "
            "If it changed, adapt SOURCES in tasks/hub.py, or set TURNWISE_DATA to a folder with data (docs/data.md)."
        ) from None
    except Exception as error:
        raise SystemExit(
            f"--task {name}: {where}, split {split}, could not be loaded "
            f"({type(error).__name__}: {first_line(error)}). "
            "Try again, or set TURNWISE_DATA to a folder with the data (docs/data.md)."
        ) from None
    check_columns(name, source, split, rows.features)
    return rows.select_columns(list(source.columns)).with_format("arrow")


def unreachable(name: str, where: str, error: Exception) -> str:
    """Return the message for a data set that is neither in the cache nor on a hub within reach."""
    return (
        f"--task {name}: {where} is not on this machine and the hub is out of reach ({first_line(error)}). Load it "
        "once with internet access, or set TURNWISE_DATA to a folder with the data (docs/data.md)."
    )


def place(source: Source) -> str:
    """Return a data set's place for messages: owner/name, its configuration, and the folder TURNWISE_DATA if set."""
    folder = os.environ.get("TURNWISE_DATA")
    config = f" (configuration {source.config})" if source.config else ""
    return f"{source.path}{config}" + (f" in TURNWISE_DATA={folder}" if folder else "")


def local(name: str, source: Source, split: str, folder: Path) -> tuple[str, dict]:
    """Return (builder, arguments) for load_dataset to read a split of a folder. Raises SystemExit if it is missing."""
    stem = folder / source.path / (source.config or "default") / split
    for ending, builder in ((".parquet", "parquet"), (".jsonl", "json")):
        file = Path(f"{stem}{ending}")
        if file.is_file():
            return builder, {"data_files": {split: str(file)}}
    raise SystemExit(
        f"--task {name}: TURNWISE_DATA={folder} has neither {stem}.parquet nor {stem.name}.jsonl. Put the split there "
        "(docs/data.md), or unset TURNWISE_DATA to load it from the hub."
    )


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, at most 200 characters, without a final period or colon."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".:")


def check_columns(name: str, source: Source, split: str, features: dict) -> None:
    """Raise SystemExit if a column is missing or does not have the type of its Source."""
    for column, expected in source.columns.items():
        found = features.get(column)
        if found is None:
            actual = f"and found the columns {', '.join(features)}"
        elif not fits(found, expected):
            actual = f"and found {describe(found)}"
        else:
            continue
        raise SystemExit(
            f"--task {name}: {place(source)}, split {split}: expected a column {column} of {describe(expected)}, "
            f"{actual}. If the data set changed, adapt SOURCES in tasks/hub.py."
        )


def fits(found: object, expected: object) -> bool:
    """Return whether a column's type (of `datasets`) is that of its Source. A column without values always fits."""
    if getattr(found, "dtype", None) == "null":
        return True
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(k in found and fits(found[k], v) for k, v in expected.items())
    if isinstance(expected, list):
        inner = found[0] if isinstance(found, list) else getattr(found, "feature", None)
        return inner is not None and fits(inner, expected[0])
    kinds = expected if isinstance(expected, tuple) else (expected,)
    return getattr(found, "dtype", None) in set().union(*(TYPES[kind] for kind in kinds))


def describe(kind: object) -> str:
    """Return a type in words: one of Source, or one of `datasets`."""
    if isinstance(kind, dict):
        return "{" + ", ".join(f"{name}: {describe(inner)}" for name, inner in kind.items()) + "}"
    if isinstance(kind, list) or hasattr(kind, "feature"):
        return f"list of {describe(kind[0] if isinstance(kind, list) else kind.feature)}"
    if isinstance(kind, tuple):
        return " or ".join(map(describe, kind))
    names = {str: "string", bool: "bool", int: "integer", float: "float"}
    return names[kind] if isinstance(kind, type) else str(getattr(kind, "dtype", kind))


# ---- from rows to questions and documents


def read_questions(source: Source, split: str, rows: "datasets.Dataset") -> list[Question]:
    """Return the questions of a split, without the rows that have no question or no usable answer.

    ids are unique; golds have no duplicates and keep their order.
    """
    columns = [c for c in source.columns if not source.paragraphs or c != source.paragraphs[0]]
    usable = {"search": normal_form, "math": equality.plain}.get(source.kind, str)
    questions, seen = [], Counter()
    for batch in rows.select_columns(columns).iter(BATCH):
        for question in map(source.read, batch.to_pylist()):
            if question is None or not visible(question.text):
                continue
            golds = list(dict.fromkeys(gold.strip() for gold in question.golds if visible(gold)))
            if source.kind != "code" and not any(visible(usable(gold)) for gold in golds):
                continue
            name = f"{split}-{question.id or digest(question.text)[:16]}"
            seen[name] += 1
            if seen[name] > 1:
                name = f"{name}~{seen[name]}"
            questions.append(replace(question, id=name, golds=golds))
    return questions


def documents_of(source: Source, tables: "list[datasets.Dataset]") -> list[dict]:
    """Return the paragraphs of all splits, each (title, text) once, in order of occurrence, with ids "0", "1", ..."""
    column, paragraphs = source.paragraphs
    unique = {}
    for rows in tables:
        for batch in rows.select_columns([column]).iter(BATCH):
            for cell in batch.column(column).to_pylist():
                for title, text in paragraphs(cell or {}):
                    title, text = (" ".join(part.split()) for part in (title, text))
                    if title or text:
                        unique[title, text] = None
    return [{"id": str(i), "title": title, "text": text} for i, (title, text) in enumerate(unique)]


def sentences(cell: dict) -> list[tuple[str, str]]:
    """Return [(title, text)] of a cell {"title": [...], "sentences": [[...], ...]}."""
    pairs = zip(cell.get("title") or (), cell.get("sentences") or ())
    return [(title or "", " ".join(sentence for sentence in text or () if sentence)) for title, text in pairs]


def paragraphs(cell: Iterable[dict]) -> list[tuple[str, str]]:
    """Return [(title, text)] of a cell [{"title", "paragraph_text"}, ...]."""
    return [(item["title"] or "", item["paragraph_text"] or "") for item in cell if item]


def make_question(identity: str | float | None, text: str | None, *golds: str | float | None, **info) -> Question:
    """Return a Question from cells that may be empty. Numbers become text, integers without a .0."""
    whole = (int(gold) if isinstance(gold, float) and gold.is_integer() else gold for gold in golds)
    golds = [str(gold) for gold in whole if gold is not None]
    return Question("" if identity is None else str(identity), text or "", golds, info=info)


def musique(row: dict) -> Question | None:
    """Return the Question of a row of MuSiQue, None if it is unanswerable."""
    if row["answerable"] is False:
        return None
    return make_question(row["id"], row["question"], row["answer"], *(row["answer_aliases"] or ()))


def olympiad(row: dict) -> Question:
    """Return the Question of a row of OlympiadBench. Several values become one gold, alternatives one gold each."""
    golds = row["final_answer"] or []
    if row["is_multiple_answer"] and len(golds) > 1:
        golds = [None if None in golds else ", ".join(gold.strip().strip("$") for gold in golds)]
    text = "\n".join(part.strip() for part in (row["context"], row["question"]) if part and part.strip())
    return make_question(row["id"], text, *golds)


def gpqa(row: dict) -> Question | None:
    """Return the Question of a row of GPQA. A hash orders the options, so that positions carry no information."""
    cells = [row["Correct Answer"], *(row[f"Incorrect Answer {n}"] for n in (1, 2, 3))]
    options = [" ".join((cell or "").split()) for cell in cells]
    if not all(options) or options[0] in options[1:] or not (row["Question"] or "").strip():
        return None
    question = row["Question"].strip()
    order = sorted(options, key=lambda option: digest(f"{question}\n{option}"))
    lines = [f"{letter}) {option}" for letter, option in zip("ABCD", order)]
    return make_question(row["Record ID"], "\n".join([question, *lines]), "ABCD"[order.index(options[0])])


def humaneval(row: dict) -> Question | None:
    """Return the Question of a row of HumanEval."""
    info = {name: row[name] for name in ("prompt", "test", "entry_point")}
    return make_question(row["task_id"], row["prompt"], **info) if all(info.values()) else None


def same_words(text: str) -> str:
    """Return the key of a question in words: case, punctuation and articles make no difference."""
    return normal_form(text) or text


def same_signs(text: str) -> str:
    """Return the key of a question of mathematics or code: white space makes no difference, but signs and case do."""
    return "".join(text.split())


KEYS = {"search": same_words, "math": same_signs, "choice": same_signs, "code": same_signs}

HOTPOT = dict(
    kind="search",
    columns={
        "id": str,
        "question": str,
        "answer": str,
        "context": {"title": [str], "sentences": [[str]]},
    },
    read=lambda row: make_question(row["id"], row["question"], row["answer"]),
    train="train",
    test="validation",
    paragraphs=("context", sentences),
)
FLASHRAG = dict(
    kind="search",
    path="RUC-NLPIR/FlashRAG_datasets",
    columns={"id": str, "question": str, "golden_answers": [str]},
    read=lambda row: make_question(row["id"], row["question"], *(row["golden_answers"] or ())),
    test="test",
)
SOURCES = {
    "hotpotqa": Source(path="hotpotqa/hotpot_qa", config="distractor", **HOTPOT),
    "2wiki": Source(path="framolfese/2WikiMultihopQA", **HOTPOT),
    "musique": Source(
        kind="search",
        path="dgslibisey/MuSiQue",
        columns={
            "id": str,
            "question": str,
            "answer": str,
            "answer_aliases": [str],
            "answerable": bool,
            "paragraphs": [{"title": str, "paragraph_text": str}],
        },
        read=musique,
        train="train",
        test="validation",
        paragraphs=("paragraphs", paragraphs),
    ),
    "nq": Source(config="nq", train="train", **FLASHRAG),
    "triviaqa": Source(config="triviaqa", train="train", **FLASHRAG),
    "popqa": Source(config="popqa", **FLASHRAG),
    "bamboogle": Source(config="bamboogle", **FLASHRAG),
    "nq_hotpotqa": Source(
        kind="search",
        path="PeterJinGo/nq_hotpotqa_train",
        columns={"id": str, "question": str, "golden_answers": [str], "data_source": str},
        read=lambda row: make_question(
            f"{row['data_source']}-{row['id']}",  # ids are unique only within each of the mixed data sets
            row["question"],
            *(row["golden_answers"] or ()),
            source=row["data_source"],
        ),
        train="train",
        test="test",
    ),
    "gsm8k": Source(
        kind="math",
        path="openai/gsm8k",
        config="main",
        columns={"question": str, "answer": str},
        read=lambda row: make_question(None, row["question"], (row["answer"] or "").partition("####")[2].strip()),
        train="train",
        test="test",
    ),
    "math": Source(
        kind="math",
        path="DigitalLearningGmbH/MATH-lighteval",
        columns={"problem": str, "solution": str},
        read=lambda row: make_question(None, row["problem"], equality.boxed(row["solution"] or "")),
        train="train",
        test="test",
        apart=("math500",),
    ),
    "math500": Source(
        kind="math",
        path="HuggingFaceH4/MATH-500",
        columns={"unique_id": str, "problem": str, "answer": str},
        read=lambda row: make_question(row["unique_id"], row["problem"], row["answer"]),
        test="test",
    ),
    "aime24": Source(
        kind="math",
        path="HuggingFaceH4/aime_2024",
        columns={"id": NUMBER, "problem": str, "answer": NUMBER},
        read=lambda row: make_question(row["id"], row["problem"], row["answer"]),
        test="train",  # its only split
    ),
    "aime25": Source(
        kind="math",
        path="math-ai/aime25",
        columns={"id": NUMBER, "problem": str, "answer": NUMBER},
        read=lambda row: make_question(row["id"], row["problem"], row["answer"]),
        test="test",
    ),
    "amc23": Source(
        kind="math",
        path="math-ai/amc23",
        columns={"id": NUMBER, "question": str, "answer": NUMBER},
        read=lambda row: make_question(row["id"], row["question"], row["answer"]),
        test="test",
    ),
    "olympiadbench": Source(
        kind="math",
        path="Hothan/OlympiadBench",
        config="OE_TO_maths_en_COMP",  # open-ended, text only, mathematics, English, competitions
        columns={"id": NUMBER, "context": str, "question": str, "final_answer": [str], "is_multiple_answer": bool},
        read=olympiad,
        test="train",  # its only split
    ),
    "svamp": Source(
        kind="math",
        path="ChilleD/SVAMP",
        columns={"ID": str, "question_concat": str, "Answer": NUMBER},
        read=lambda row: make_question(row["ID"], row["question_concat"], row["Answer"]),
        train="train",
        test="test",
    ),
    "gpqa": Source(
        kind="choice",
        path="Idavidrein/gpqa",
        config="gpqa_diamond",
        columns=dict.fromkeys(
            ("Record ID", "Question", "Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3))), str
        ),
        read=gpqa,
        test="train",  # its only split
        gated=True,
    ),
    "humaneval": Source(
        kind="code",
        path="openai/openai_humaneval",
        columns=dict.fromkeys(("task_id", "prompt", "test", "entry_point"), str),
        read=humaneval,
        test="test",
    ),
}
