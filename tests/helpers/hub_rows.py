"""Makes small files of the named data sets as the hub has them, with the hard cases: all columns, their real types, and
the file format of the original (Parquet or JSON Lines).

    write(folder, "gsm8k")      # <folder>/openai/gsm8k/main/train.parquet and test.parquet; all sets: write(folder)
"""

import json
import random

import pyarrow as pa
import pyarrow.parquet

TEXT, WHOLE = pa.string(), pa.int64()
TEXTS = pa.list_(TEXT)
FACTS = pa.struct({"title": TEXTS, "sent_id": pa.list_(pa.int32())})
CONTEXT = pa.struct({"title": TEXTS, "sentences": pa.list_(TEXTS)})
HOTPOT = {"id": TEXT, "question": TEXT, "answer": TEXT, "type": TEXT, "level": TEXT}
HOTPOT |= {"supporting_facts": FACTS, "context": CONTEXT}
TWOWIKI = {"id": TEXT, "question": TEXT, "answer": TEXT, "type": TEXT, "evidences": pa.list_(TEXTS)}
TWOWIKI |= {"supporting_facts": FACTS, "context": CONTEXT}
MESSAGE = pa.list_(pa.struct({"role": TEXT, "content": TEXT}))
SEARCH_R1 = {
    "id": TEXT,
    "question": TEXT,
    "golden_answers": TEXTS,
    "data_source": TEXT,
    "prompt": MESSAGE,
    "ability": TEXT,
}
SEARCH_R1 |= {
    "reward_model": pa.struct({"ground_truth": pa.struct({"target": TEXTS}), "style": TEXT}),
    "extra_info": pa.struct({"index": WHOLE, "split": TEXT}),
    "metadata": pa.null(),
}
GPQA = ["Record ID", "Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]
OLYMPIAD = {"id": WHOLE, "question": TEXT, "solution": TEXTS, "final_answer": TEXTS, "context": TEXT, "image_1": TEXT}
OLYMPIAD |= {"modality": TEXT, "difficulty": TEXT, "is_multiple_answer": pa.bool_(), "unit": TEXT, "answer_type": TEXT}
OLYMPIAD |= dict.fromkeys(("error", "question_type", "subfield", "subject", "language"), TEXT)


def paragraph(*pairs):
    """Return a cell of hotpotqa's column `context` from pairs of a title and a list of sentences."""
    return {"title": [title for title, _ in pairs], "sentences": [sentences for _, sentences in pairs]}


HOUSES = [
    ("Ada Cole", ["Ada Cole works for Nova Labs.", " She likes tea."]),
    ("Nova Labs", ["Nova Labs is led by Bo Hale."]),
    ("Nova Labs", ["Nova Labs is a song."]),  # the same title, another text
    ("Øre", ["Das Øre  ist\tein Fluß."]),
]


def hotpot(identity, question, answer, pairs=HOUSES):
    facts = {"title": ["Ada Cole"], "sent_id": [0]}
    row = {"id": identity, "question": question, "answer": answer, "type": "bridge", "level": "hard"}
    return row | {
        "supporting_facts": facts,
        "context": paragraph(*pairs),
        "evidences": [["Ada Cole", "employer", "Nova Labs"]],
    }


HOTPOT_TRAIN = [
    *(hotpot(f"5a{i}", f"Who leads firm {i}?", "Bo Hale") for i in range(8)),
    hotpot("5b0", "Who leads the firm of Ada Cole?", "Bo Hale"),  # asked in validation too
    hotpot("5b1", "which river is it", "Øre"),  # occurs twice, apart from case and punctuation
    hotpot("5b2", "Which river is it?", " Øre "),
    hotpot("5b3", "Which article?", "the"),  # empty in normal form
    hotpot("5b4", "Which?", ""),
    hotpot("5b5", "Which one?", None),
    hotpot("5a0", "An id that occurs twice?", "yes"),
]
HOTPOT_VALIDATION = [
    hotpot("5c0", "who leads firm of Ada Cole", "Bo Hale", HOUSES[1:]),
    hotpot("5c1", "Is it so?", "no", [("Empty", []), ("", [""]), ("Nova Labs", ["Nova  Labs is led by", "Bo Hale."])]),
    hotpot("5c2", "What is in its context?", "nothing", []),
]


def musique(identity, question, answer, aliases=(), answerable=True):
    paragraphs = [
        {"idx": 0, "title": "Ada Cole", "paragraph_text": "Ada Cole works for Nova Labs.", "is_supporting": True},
        {"idx": 1, "title": "Ada Cole", "paragraph_text": "Ada Cole works for Nova Labs.", "is_supporting": False},
        {"idx": 2, "title": identity, "paragraph_text": "Bo Hale leads it.\nHe likes tea.", "is_supporting": True},
    ]
    steps = [{"id": 1, "question": "Ada Cole >> employer", "answer": "Nova Labs", "paragraph_support_idx": 0}]
    row = {"id": identity, "paragraphs": paragraphs, "question": question, "question_decomposition": steps}
    return row | {"answer": answer, "answer_aliases": list(aliases), "answerable": answerable}


def flashrag(identity, question, golds, **more):
    return {"id": identity, "question": question, "golden_answers": golds, **more}


def search_r1(source, identity, question, golds):
    message = [{"role": "user", "content": f"Answer the given question. Question: {question}\n"}]
    truth = {"ground_truth": {"target": golds}, "style": "rule"}
    row = flashrag(identity, question, golds, data_source=source, prompt=message, ability="fact-reasoning")
    return row | {"reward_model": truth, "extra_info": {"index": 0, "split": identity.split("_")[0]}, "metadata": None}


def competition(problem, solution):
    return {"problem": problem, "level": "Level 5", "type": "Algebra", "solution": solution}


def math500(identity, problem, answer):
    row = {"problem": problem, "solution": f"It is $\\boxed{{{answer}}}$.", "answer": answer}
    return row | {"subject": "Algebra", "level": 1, "unique_id": identity}


def olympiad(identity, question, final_answer, context=None, several=False):
    row = {name: None for name in OLYMPIAD} | {"id": identity, "question": question, "final_answer": final_answer}
    more = {"context": context, "is_multiple_answer": several, "solution": ["So."], "modality": "Text-only"}
    return row | more | {"language": "English", "subject": "Math", "answer_type": "Numerical", "subfield": "Algebra"}


def svamp(identity, body, question, answer):
    row = {"ID": identity, "Body": body, "Question": question, "Equation": "( 8.0 - 3.0 )", "Answer": answer}
    return row | {"Type": "Subtraction", "question_concat": f"{body} {question}"}


def gpqa(identity, question, *options):
    return dict(zip(GPQA, (identity, question, *options))) | {"Subdomain": "Physics", "High-level domain": "Physics"}


ADD = 'def add(a, b):\n    """The sum.\n\n    >>> add(1, 2)\n    3\n    """\n'

# name -> (folder, ending, columns or None where the file has no types, {split: rows})
SETS = {
    "hotpotqa": (
        "hotpotqa/hotpot_qa/distractor",
        "parquet",
        HOTPOT,
        {"train": HOTPOT_TRAIN, "validation": HOTPOT_VALIDATION},
    ),
    "2wiki": (
        "framolfese/2WikiMultihopQA/default",
        "parquet",
        TWOWIKI,
        {"train": HOTPOT_TRAIN, "validation": HOTPOT_VALIDATION, "test": [hotpot("5d0", "Hidden?", "")]},
    ),
    "musique": (
        "dgslibisey/MuSiQue/default",
        "jsonl",
        None,
        {
            "train": [
                *(musique(f"2hop__{i}", f"Who leads firm {i}?", "Bo Hale") for i in range(6)),
                musique("2hop__6", "Who is not there?", "Nobody", answerable=False),
            ],
            "validation": [
                musique("3hop1__7", "When?", "1988", ["1988", "in 1988", "the year 1988", "1988"]),
                musique("4hop2__8", "Who?", "Małgorzata Braunek", ["Malgorzata Braunek", " "]),
            ],
        },
    ),
    "nq": (
        "RUC-NLPIR/FlashRAG_datasets/nq",
        "jsonl",
        None,
        {
            "train": [flashrag(f"train_{i}", f"who is number {i}", [f"Number {i}"]) for i in range(8)],
            "dev": [flashrag("dev_0", "not read", ["x"])],
            "test": [
                flashrag(
                    "test_0", "who got the first nobel prize in physics", ["Wilhelm Conrad Röntgen", "W. C. Röntgen"]
                ),
                flashrag("test_1", "how many", ["14 December 1972 UTC", "14 December 1972 UTC", "December 1972"]),
                flashrag("test_2", "nobody knows", []),
            ],
        },
    ),
    "triviaqa": (
        "RUC-NLPIR/FlashRAG_datasets/triviaqa",
        "jsonl",
        None,
        {
            "train": [
                flashrag(f"train_{i}", f"Which is number {i}?", [f"NUMBER {i}", f"number {i}"]) for i in range(8)
            ],
            "test": [flashrag("test_0", "Who was 'The Boss'?", ["Springsteen", "The Boss", "Bruce Springsteen"])],
        },
    ),
    "popqa": (
        "RUC-NLPIR/FlashRAG_datasets/popqa",
        "jsonl",
        None,
        {
            "test": [
                flashrag("test_0", "What is his job?", ["politician", "political leader"], metadata={"s_pop": 142}),
                flashrag("test_1", "Where?", ["Zürich", "Zurich"], metadata={"s_pop": 7}),
            ]
        },
    ),
    "bamboogle": (
        "RUC-NLPIR/FlashRAG_datasets/bamboogle",
        "jsonl",
        None,
        {"test": [flashrag(f"test_{i}", f"When was number {i} born?", [f"{1900 + i}"], metadata={}) for i in range(3)]},
    ),
    "nq_hotpotqa": (
        "PeterJinGo/nq_hotpotqa_train/default",
        "parquet",
        SEARCH_R1,
        {
            "train": [
                *(search_r1("nq", f"train_{i}", f"who is {i}?", [f"Number {i}"]) for i in range(6)),
                *(search_r1("hotpotqa", f"train_{i}", f"Who leads {i}?", ["Bo Hale"]) for i in range(6)),
            ],
            "test": [
                search_r1("nq", "test_0", "who is first?", ["Ada Cole", "ada cole"]),
                search_r1("bamboogle", "test_0", "Who is second?", ["Bo Hale"]),
                search_r1("popqa", "test_9", "Who leads 0?", ["Bo Hale"]),  # hotpotqa's train has it
            ],
        },
    ),
    "gsm8k": (
        "openai/gsm8k/main",
        "parquet",
        {"question": TEXT, "answer": TEXT},
        {
            "train": [
                {
                    "question": f"She has {i} apples and eats 1. How many?",
                    "answer": f"{i}-1=<<{i}-1={i - 1}>>\n#### {i - 1}",
                }
                for i in range(1, 9)
            ],
            "test": [
                {"question": "What is the price?", "answer": "It is $1,000 * 2.\n#### 2,000"},
                {"question": "How cold is it?", "answer": "#### -3"},
                {"question": "No answer?", "answer": "I do not know."},
            ],
        },
    ),
    "math": (
        "DigitalLearningGmbH/MATH-lighteval/default",
        "parquet",
        dict.fromkeys(("problem", "level", "solution", "type"), TEXT),
        {
            "train": [
                *(competition(f"What is ${i}+x$?", f"It is $\\boxed{{{i}+x}}$.") for i in range(8)),
                competition("What  is $\\sqrt{9}$?", "$\\boxed{3}$"),  # in MATH-500, with other spaces
                competition("Is $X$ it?", "First $\\boxed{1}$, then $\\boxed{\\frac{\\sqrt{3}}{2^{10}}}$."),
                competition(
                    "Is $x$ it?", "So $A = \\boxed{\\left\\{1, 2\\right\\}}$"
                ),  # another question: case matters
            ],
            "test": [
                competition("What is a half?", "\\boxed{\\frac{1}{2}}"),
                competition("How many?", "It is $\\boxed 7$."),
                competition("No box?", "It is seven."),
                competition("An open box?", "It is $\\boxed{7$."),
            ],
        },
    ),
    "math500": (
        "HuggingFaceH4/MATH-500/default",
        "jsonl",
        None,
        {
            "test": [
                math500("test/algebra/1.json", "What is $\\sqrt{9}$?", "3"),
                math500("test/precalculus/2.json", "Where?", "\\left( 3, \\frac{\\pi}{2} \\right)"),
            ]
        },
    ),
    "aime24": (
        "HuggingFaceH4/aime_2024/default",
        "parquet",
        {"id": WHOLE} | dict.fromkeys(("problem", "solution", "answer", "url", "year"), TEXT),
        {
            "train": [
                {
                    "id": 60,
                    "problem": "How long?",
                    "solution": "$\\boxed{204}$",
                    "answer": "204",
                    "url": "u",
                    "year": "2024",
                },
                {"id": 61, "problem": "And then?", "solution": "25.", "answer": "025", "url": "u", "year": "2024"},
            ]
        },
    ),
    "aime25": (
        "math-ai/aime25/default",
        "jsonl",
        None,
        {"test": [{"problem": f"Find {i}.", "answer": str(70 + i), "id": str(i)} for i in range(3)]},
    ),
    "amc23": (
        "math-ai/amc23/default",
        "parquet",
        {"id": WHOLE, "question": TEXT, "answer": pa.float64(), "url": TEXT},
        {"test": [{"id": i, "question": f"How far is {i}?", "answer": 27.0 + i / 2, "url": "u"} for i in range(3)]},
    ),
    "olympiadbench": (
        "Hothan/OlympiadBench/OE_TO_maths_en_COMP",
        "parquet",
        OLYMPIAD,
        {
            "train": [
                olympiad(1606, "Find $T$.", ["2"], context="Let $T=1$."),
                olympiad(1610, "Find all.", ["$1$", "$-2$"], several=True),
                olympiad(1612, "Find one.", ["$\\frac{1}{2}$", "0.5"]),
                olympiad(1613, "Prove it.", []),
                olympiad(1614, "Prove that.", None),
            ]
        },
    ),
    "svamp": (
        "ChilleD/SVAMP/default",
        "parquet",
        dict.fromkeys(("ID", "Body", "Question", "Equation", "Answer", "Type", "question_concat"), TEXT),
        {
            "train": [svamp(f"chal-{i}", f"She has {i} pies.", "How many are left?", f"{i}.0") for i in range(8)],
            "test": [svamp("chal-777", "There are 8 pies", "How many are 3 less?", "5.0")],
        },
    ),
    "gpqa": (
        "Idavidrein/gpqa/gpqa_diamond",
        "parquet",
        dict.fromkeys((*GPQA, "Subdomain", "High-level domain"), TEXT),
        {
            "train": [
                *(
                    gpqa(f"rec{i}", f"Which is {i}?\n", f"{i} eV", "one\nof\nmany", "3 eV ", f"not {i}")
                    for i in range(40, 80)
                ),
                gpqa("recX", "Twice?", "1", "2", "3", "1 "),  # an option that is right and wrong
                gpqa("recY", "Three options?", "1", "2", "3", None),
            ]
        },
    ),
    "humaneval": (
        "openai/openai_humaneval/default",
        "parquet",
        dict.fromkeys(("task_id", "prompt", "canonical_solution", "test", "entry_point"), TEXT),
        {
            "test": [
                {
                    "task_id": f"HumanEval/{i}",
                    "prompt": ADD.replace("add", f"add{i}"),
                    "canonical_solution": "    return a + b\n",
                    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
                    "entry_point": f"add{i}",
                }
                for i in range(2)
            ]
        },
    ),
}


def save(file, rows, columns=None):
    """Write rows in the format of the file's ending. columns: {name: Arrow type}; other keys of a row are left out."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    else:
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows, pa.schema(columns)), file)


def write(folder, *names):
    """Write the files of some data sets, or of all, to <folder>/<owner>/<name>/<configuration>/<split>.<ending>."""
    for name in names or SETS:
        place, ending, columns, splits = SETS[name]
        for split, rows in splits.items():
            save(folder / place / f"{split}.{ending}", rows, columns)


def write_hotpot(folder, train=150, validation=50, pool=400):
    """Write hotpotqa with 10 paragraphs a question: two that link person i to a leader, and eight from a shared pool.
    Returns the rows, those of train first."""
    draw = random.Random(0)
    towns = [(f"Town {i % 50}", [f"Town {i % 50} has {i} inhabitants.", " It lies by a river."]) for i in range(pool)]
    rows = []
    for i in range(train + validation):
        links = [
            (f"Person {i}", [f"Person {i} works for Firm {i}."]),
            (f"Firm {i}", [f"Firm {i} is led by Leader {i}."]),
        ]
        pairs = links + draw.sample(towns, 8)
        draw.shuffle(pairs)
        rows.append(hotpot(f"{i:024x}", f"Who leads the firm of Person {i}?", f"Leader {i}", pairs))
    folder = folder / SETS["hotpotqa"][0]
    save(folder / "train.parquet", rows[:train], HOTPOT)
    save(folder / "validation.parquet", rows[train:], HOTPOT)
    return rows
