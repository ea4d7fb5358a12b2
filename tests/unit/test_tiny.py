"""The embedded default task: the world, its questions, and its base."""

import functools
import hashlib

import pytest

from common import models
from tasks import tags, wordings
from tasks.tiny import pretrain, tiny_math, tiny_search
from tools.search import Search


@pytest.fixture(scope="module")
def world():
    return tiny_search.search_world()


def test_the_world_is_the_same_at_every_call(world):
    assert tiny_search.search_world() == world


def test_held_out_questions_and_entities_are_disjoint_from_training_ones(world):
    documents, train, held_out = world
    assert len(train) >= 2000 and len(held_out) >= 300
    assert not {q["question"] for q in train} & {q["question"] for q in held_out}
    names = tiny_search._names()
    groups = [{name for kind in group.values() for name in kind} for group in names.values()]
    assert not groups[0] & groups[1] and not groups[0] & groups[2] and not groups[1] & groups[2]
    for group, questions in (("train", train), ("held_out", held_out)):
        other = {name for kind in names["held_out" if group == "train" else "train"].values() for name in kind}
        own = {name for kind in names[group].values() for name in kind}
        for question in questions:
            assert question["answers"][0] in own
            assert not any(name in question["question"] for name in other)
    assert {d["title"] for d in documents} == groups[0] | groups[1]


def test_questions_have_one_to_three_hops_and_no_answer_in_the_question(world):
    _, train, held_out = world
    assert {q["hops"] for q in held_out[:200]} == {1, 2, 3}
    for question in train + held_out:
        assert len(question["answers"]) == 1 and question["answers"][0] not in question["question"]


def test_one_search_does_not_answer_a_question_of_several_hops(world):
    documents, _, held_out = world
    search = Search(documents, 1)
    several = [q for q in held_out if q["hops"] > 1]
    found = sum(q["answers"][0] in search(q["question"]) for q in several)
    assert found / len(several) < 0.03


def test_every_passage_is_found_by_its_title_and_leads_on_to_the_answer(world):
    documents, _, held_out = world
    search = Search(documents, 1)
    for document in documents:
        assert search(document["title"]) == f"Doc 1 (Title: {document['title']}) {document['text']}"
    texts = {d["title"]: d["text"] for d in documents}
    for question in held_out[:100]:
        reached = {name for name in texts if name in question["question"]}
        for _ in range(question["hops"]):
            reached |= {name for name in texts for known in reached if name in texts[known]}
        assert question["answers"][0] in reached


@pytest.fixture(scope="module")
def tokenizer():
    return models.load_tokenizer(models.resolve("tiny"))


def test_a_name_is_read_and_written_as_the_same_tokens(world, tokenizer):
    documents, _, _ = world
    for document in documents[:100]:
        name = tokenizer.encode(f" {document['title']}")
        for text in (f"<search> {document['title']} </search>", f"<answer> {document['title']} </answer>"):
            assert tokenizer.encode(text)[1:-1][: len(name)] == name
        found = f"Doc 1 (Title: {document['title']}) {document['text']}"
        _, observation = tags.cut_observation(tokenizer, found, 96, wordings.INFORMATION)
        assert any(observation[i : i + len(name)] == name for i in range(len(observation)))
        assert len(observation) < 96  # no passage is cut


def test_the_tokenizer_loads_as_it_was_made_and_round_trips(world, tokenizer):
    made = tiny_search._tokenizer()
    documents, _, held_out = world
    for text in [d["text"] for d in documents] + [wordings.INSTRUCTION + q["question"] for q in held_out]:
        ids = tokenizer.encode(text)
        assert ids == made.encode(text) and tokenizer.decode(ids) == text
    assert [tokenizer.convert_ids_to_tokens(tokenizer.encode(tag)) for tag in tiny_search.TAGS] == [
        [tag] for tag in tiny_search.TAGS
    ]
    assert len(tokenizer) == len(made) and tokenizer.chat_template is None


# ---- the bases that come with the project


def worlds():
    """Return {name: (lesson, steps of pretraining, wording, tokenizer)} of the two bases."""
    lesson = functools.partial(tiny_search._lesson, tiny_search._names()["pretraining"])
    return {
        "tiny": (lesson, tiny_search.STEPS, tiny_search.WORDING, tiny_search._tokenizer),
        "tiny-math": (tiny_math._lesson, tiny_math.STEPS, tiny_math.WORDING, tiny_math._tokenizer),
    }


@pytest.mark.parametrize("name", ["tiny", "tiny-math"])
def test_a_shipped_base_belongs_to_the_current_lessons_and_has_the_recorded_weights(name):
    lesson, steps, wording, _ = worlds()[name]
    folder = pretrain.SHIPPED / name / pretrain.key(lesson, steps, wording)
    assert folder.is_dir() and models.resolve(name) == str(folder)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert f"{digest}  {folder.relative_to(pretrain.SHIPPED)}/model.safetensors" in sums()


def sums():
    return (pretrain.SHIPPED / "SHA256SUMS").read_text().splitlines()


@pytest.mark.parametrize("name", ["tiny", "tiny-math"])
def test_a_change_of_lessons_or_steps_is_another_base(name):
    lesson, steps, wording, _ = worlds()[name]
    keys = {pretrain.key(lesson, steps, wording), pretrain.key(lesson, steps + 1, wording)}
    keys.add(pretrain.key(lambda rng, done: [*lesson(rng, done), ("x", "turn")], steps, wording))
    assert len(keys) == 3


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["tiny", "tiny-math"])
def test_the_builder_makes_the_shipped_base_again(name, tmp_path):
    """Build it again bit for bit. This needs the kind of CPU it was built on (x86-64, AVX2): others round differently."""
    lesson, steps, wording, tokenizer = worlds()[name]
    pretrain.build(tmp_path / "base", tokenizer, lesson, steps, wording)
    digest = hashlib.sha256((tmp_path / "base" / "model.safetensors").read_bytes()).hexdigest()
    assert f"{digest}  {name}/{pretrain.key(lesson, steps, wording)}/model.safetensors" in sums()
