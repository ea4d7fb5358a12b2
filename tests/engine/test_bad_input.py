"""Bad input is refused at the start, in one line that says what to do next, with an exit code other than 0."""

import json
import socket

import commands
import pytest

import tasks
import train_grpo
from common import models, policy, run
from common.args import parse_args
from view import plan

QUESTION = {"question": "Which town is by the river?", "answers": ["Oakford"]}
DOCUMENT = {"id": "1", "title": "Oakford", "text": "a town by the river"}


def start(words, script=train_grpo):
    """Do what a script does before training, without process group and engine."""
    args = parse_args(script.Args, words)
    plan.fit(args, tasks.load(args))
    if wrong := run.claim(args, run.directory(args)):
        raise SystemExit(wrong)
    policy.Policy(args)


@pytest.fixture
def folder(tmp_path, qwen, monkeypatch):
    """Make a folder of good and bad files the current directory. Returns the words for TABLE's placeholders."""

    def write(name, *lines):
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        (tmp_path / name).write_text(text)

    write("q.jsonl", *(QUESTION | {"question": f"Which town is number {i}?"} for i in range(8)))
    write("c.jsonl", DOCUMENT)
    write("cut.jsonl", QUESTION, '{"question": "Which to')
    write("no_answer.jsonl", QUESTION, {"question": "Which town?"})
    write("twice.jsonl", QUESTION | {"id": "a"}, QUESTION | {"id": "a"})
    write("no_gold.jsonl", QUESTION, QUESTION | {"answers": ["?!"]})
    write("long_gold.jsonl", *(QUESTION | {"question": f"{i}?", "answers": ["Oakford " * 700]} for i in range(8)))
    write("long_question.jsonl", *(QUESTION | {"question": f"{i} " + "river " * 5000} for i in range(8)))
    write("empty.jsonl")
    write("bad_corpus.jsonl", DOCUMENT, {"id": "2"})
    write("same_corpus.jsonl", DOCUMENT, DOCUMENT)
    (tmp_path / "latin.jsonl").write_bytes(json.dumps(QUESTION).encode() + b'\n{"question": "\xe9"}\n')
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "thesis.tex").write_text("")
    big = dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"], hidden_size=8192, intermediate_size=29568)
    big |= dict(num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=152064)
    models_ = tmp_path / "big"
    models_.mkdir()
    (models_ / "config.json").write_text(json.dumps(big))
    models.load_tokenizer(qwen).save_pretrained(models_)
    other = tmp_path / "other_adapter"
    other.mkdir()
    (other / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen2.5-7B", "r": 8})
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.chdir(tmp_path)
    return {"qwen": qwen, "port": port}


DATA = "--model {qwen} --task q.jsonl --corpus c.jsonl"
TABLE = [
    ("--model gtp-5 --task q.jsonl --corpus c.jsonl", "--model gtp-5: no such folder, and no known short name"),
    ("--model big --task q.jsonl --corpus c.jsonl", "no GPU. .*python train_grpo.py --model tiny --task tiny_search"),
    ("--model {qwen} --task cut.jsonl --corpus c.jsonl", "cut.jsonl, line 2: not JSON"),
    ("--model {qwen} --task no_answer.jsonl --corpus c.jsonl", "no_answer.jsonl, line 2: answers is missing"),
    ("--model {qwen} --task twice.jsonl --corpus c.jsonl", "twice.jsonl, line 2: id a occurs twice, first in line 1"),
    (
        "--model {qwen} --task no_gold.jsonl --corpus c.jsonl",
        "no_gold.jsonl, line 2: every answer is empty after normalisation",
    ),
    ("--model {qwen} --task latin.jsonl --corpus c.jsonl", "latin.jsonl, line 2: not UTF-8"),
    ("--model {qwen} --task long_gold.jsonl --corpus c.jsonl", "line 1: its shortest answer takes .*--max_turn_tokens"),
    ("--model {qwen} --task long_question.jsonl --corpus c.jsonl", "long_question.jsonl, line .*--max_context is 5120"),
    ("--model {qwen} --task empty.jsonl --corpus c.jsonl", "empty.jsonl: no questions"),
    ("--model {qwen} --task gone.jsonl --corpus c.jsonl", "--task gone.jsonl: No such file"),
    ("--model {qwen} --task q.jsonl", "--task q.jsonl needs something to search in: --corpus .*--retriever"),
    ("--model {qwen} --task q.jsonl", "--task_kind math"),
    (
        "--model {qwen} --task q.jsonl --task_kind math --corpus c.jsonl",
        "by computing, so there is nothing to search in",
    ),
    ("--model tiny --task tiny_math", "has not learned to use Python. Use --model tiny-math"),
    ("--model tiny-math --task tiny_search", "has not learned to use search. Use --model tiny"),
    ("--model {qwen} --task reasoning_gym:chain_sun", "no such data set. Similar names: .*chain_sum"),
    ("--model {qwen} --task q.jsonl --corpus gone.jsonl", "--corpus: .*No such file.*gone.jsonl"),
    ("--model {qwen} --task q.jsonl --corpus bad_corpus.jsonl", "bad_corpus.jsonl, line 2: .*title is missing"),
    ("--model {qwen} --task q.jsonl --corpus same_corpus.jsonl", "same_corpus.jsonl, line 2: .*id 1 occurs twice"),
    ("--model {qwen} --task q.jsonl --corpus empty.jsonl", "empty.jsonl: the corpus is empty"),
    (
        "--model {qwen} --task q.jsonl --retriever 127.0.0.1:{port}",
        "--retriever http://127.0.0.1:{port}/retrieve: .*refused",
    ),
    ("--model {qwen} --task q.jsonl --corpus c.jsonl --retriever x:1", "--corpus and --retriever: only one of them"),
    (DATA + " --out kept", "kept exists, and nothing is overwritten"),
    (DATA + " --out c.jsonl", "--out c.jsonl: cannot be written .Not a directory"),
    (DATA + " --out c.jsonl/run", "--out c.jsonl/run: cannot be written .Not a directory"),
    (DATA + " --lora_rank 513", "--lora_rank 513: the engine takes adapters of rank 1 to 512"),
    (DATA + " --group 1", "--group 1: a group needs at least 2"),
    (DATA + " --temperature 0", "--temperature 0.0: sampling needs more than 0"),
    (DATA + " --max_context 4097", "--max_context 4097: this model takes 2048 tokens at most"),
    (
        DATA + " --max_context 1024 --adapter other_adapter",
        "--adapter other_adapter: trained on Qwen/Qwen2.5-7B, not on",
    ),
    (DATA + " --adapter gone", "--adapter gone: no adapter_config.json there"),
    (DATA + " --resume", "--resume: no run in out/.* Start it without --resume"),
    ("--task=", "--task is missing"),
]


@pytest.mark.parametrize("words, message", TABLE, ids=[message[:40] for _, message in TABLE])
def test_bad_input_is_one_clear_line(words, message, folder):
    with pytest.raises(SystemExit, match=message.format(**folder)) as stopped:
        start(words.format(**folder).split())
    assert isinstance(stopped.value.code, str) and "\n" not in stopped.value.code


def test_an_adapter_of_other_shapes_does_not_fit(folder, tmp_path, make_args):
    import small_models as made

    small = made.random_qwen(tmp_path / "base", hidden_size=64, num_attention_heads=2)
    policy.Policy(make_args(model=small)).save_adapter(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = folder["qwen"]  # a false base: only the shapes can tell
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="does not fit this base .*size mismatch"):
        policy.Policy(make_args(adapter=str(tmp_path / "adapter")))


@pytest.mark.parametrize(
    "words",
    ["--task tiny_search --group 1", pytest.param("--model gtp-5 --task tiny_search", marks=pytest.mark.sweep)],
)
def test_a_refusal_exits_with_1_and_without_a_traceback(words, tmp_path):
    """Run the whole command: one refusal comes before torch is loaded, one after."""
    done = commands.command("train_grpo.py", *words.split(), "--out", tmp_path / "out", check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("--")] == done.stderr.splitlines()[-1:]
    assert not (tmp_path / "out").exists()
