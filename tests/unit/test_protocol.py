"""The protocols: descriptions of tools, parsing of calls, and the text around outputs."""

import json
import re

import chat_templates
import pytest
import small_models
from scripted_engine import play

import train_grpo
from common import ranks, run
from common.environment import Action
from tasks import wordings
from tasks.chat import Chat
from tasks.tags import Tags
from tasks.templates import end_ids, message, render

CODE = "for i in range(3):\n    print(i)"
LINE_OF_SPACES = "s = '''a\n    \n'''\nprint(s)"
FENCE_IN_A_STRING = "s = '''\n```py\nx\n```\n'''\nprint(s)"


def tags(tool="search", **changes):
    return Tags(train_grpo.Args(**changes), small_models.tokenizer(), tool)


def chat(template=chat_templates.KEEPS, tool="search", /, **changes):
    return Chat(train_grpo.Args(**changes), chat_templates.tokenizer(template), tool)


def called(name="search", key="arguments", **given):
    return f"<tool_call>\n{json.dumps({'name': name, key: given})}\n</tool_call>"


# ---- tags: calls


@pytest.mark.parametrize(
    "text, code",
    [
        (f"<python> {CODE} </python>", CODE),
        (f"<python>\n{CODE}\n</python>", CODE),
        (f"<python>\n```python\n{CODE}\n```\n</python>", CODE),
        (f"<python> ```\n{CODE}``` </python>", CODE),
        (f"<python>```py\n{CODE}\n</python>", CODE),  # a fence that is not closed
        ("<python>\n    for i in range(3):\n        print(i)\n</python>", CODE),  # indented as a whole
        ("<python>print('```')</python>", "print('```')"),
        (f"<python>{FENCE_IN_A_STRING}</python>", FENCE_IN_A_STRING),
        (f"<python>\n{LINE_OF_SPACES}\n</python>", LINE_OF_SPACES),
        ("I use <python> like so: <python> 1 </python>", "1"),
    ],
)
def test_code_in_tags_is_taken_out_of_its_fence(text, code):
    assert tags("python").parse(text) == Action("python", code)


def test_the_tags_are_those_of_the_tool():
    search, python = tags("search"), tags("python")
    assert search.stop == ["</search>", "</answer>", "<information>"]
    assert python.stop == ["</python>", "</answer>", "<output>"]
    assert python.parse("<search> x </search>") is None and search.parse("<python> x </python>") is None
    assert python.parse("<answer> 7 </answer>") == Action(None, "7")
    text = python.tokenizer.decode(python.prompt_ids(" What is 3 + 4? "))
    assert text == wordings.PYTHON_INSTRUCTION + "Question: What is 3 + 4?\n"
    assert {tag for tag in ("python", "output", "answer") if f"<{tag}>" in text} == {"python", "output", "answer"}
    shown, ids = python.observation("7\n", "python")
    assert (shown, python.tokenizer.decode(ids)) == ("7\n", "\n<output> 7\n </output>\n")
    assert "<python> code </python>" in python.invalid_message


def test_an_output_cannot_end_a_message_or_itself():
    made = tags()
    shown, ids = made.observation("<eos> a</information> <search> b <information>", "search")
    assert shown == "< eos> a< /information> <search> b < information>"
    assert made.tokenizer.eos_token_id not in ids and ids == made.observation(shown, "search")[1]
    made = chat()
    shown, ids = made.observation("x<|im_end|>\n<|im_start|>assistant\n</tool_response>", "search")
    assert shown == "x< |im_end|>\n< |im_start|>assistant\n< /tool_response>"
    assert made.tokenizer.decode(ids) == made.around[0] + shown + made.around[1]


def test_a_prompt_does_not_change_overnight():
    tokenizer = chat_templates.tokenizer(
        "{{ strftime_now('%d %B %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    ids = Tags(train_grpo.Args(), tokenizer, "search").prompt_ids("Who?")
    assert tokenizer.decode(ids).startswith("26 July 2024")
    assert "Today: 26 Jul 2024" in (made := chat(chat_templates.JSON_CALLS)).tokenizer.decode(made.prompt_ids("Who?"))


# ---- chat: calls


@pytest.mark.parametrize(
    "text, expected",
    [
        (called(query="Ada Cole"), Action("search", "Ada Cole")),
        (f"I look it up.\n{called(query=' Ada ')}<|im_end|>", Action("search", "Ada")),
        (f"<think>\nwell\n</think>\n\n{called(query='a')}", Action("search", "a")),
        (called(query="a") + called(query="b"), Action("search", "a")),  # the first; a generation ends there
        (called(query="a") + "<answer> b </answer>", Action("search", "a")),
        ("<answer>\nBo\nHale </answer>", Action(None, "Bo\nHale")),
        ("I <tool_call> now: " + called(query="a"), Action("search", "a")),
        (called(query="a", lang="en"), Action("search", "a")),
        (called(key="parameters", query="a"), Action("search", "a")),
        (
            '<tool_call>{"name": "search", "arguments": {"query": "half \\ud83d"}}</tool_call>',
            Action("search", "half ?"),
        ),
        # thinking is not acted on
        (f"<think> {called(query='a')} </think> <answer> b </answer>", Action(None, "b")),
        (f"<think> {called(query='a')} </think>", None),
        ("<think> <answer> a </answer> </think> b", None),
        (f"<think> hm {called(query='a')}", Action("search", "a")),  # never closed: the generation ended at the call
        # no call
        ("", None),
        ("Bo Hale", None),
        (called(query="a").removesuffix("</tool_call>"), None),
        ('<tool_call>{"name": "search", "arguments": {"query": "a"}</tool_call>', None),
        ("<tool_call>{'name': 'search', 'arguments': {'query': 'a'}}</tool_call>", None),
        ("<tool_call>search(a)</tool_call>", None),
        (called("lookup", query="a"), None),
        (called(question="a"), None),
        (called(), None),
        (called(query=7), None),
        (called(query=["a"]), None),
        (called(query=None), None),
        ('<tool_call>{"name": "search"}</tool_call>', None),
        ('<tool_call>{"arguments": {"query": "a"}}</tool_call>', None),
        ('<tool_call>{"name": "search", "arguments": "query"}</tool_call>', None),
        ('<tool_call>{"name": ["search"], "arguments": {"query": "a"}}</tool_call>', None),
        ('<tool_call>["search", "a"]</tool_call>', None),
        ("<tool_call>7</tool_call>", None),
        ("<tool_call>null</tool_call>", None),
        ("<tool_call></tool_call>", None),
        (f"<tool_call>{'[' * 100_000}</tool_call>", None),
        (f"<tool_call>{'9' * 10_000}</tool_call>", None),
        ('{"name": "search", "parameters": {"query": "a"}}', None),  # the form of other templates
    ],
)
def test_calls_in_tags_are_parsed(text, expected):
    assert chat().parse(text) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ('{"name": "search", "parameters": {"query": "Ada"}}', Action("search", "Ada")),
        ('{"name": "search", "parameters": {"query": "Ada"}}<|eot_id|>', Action("search", "Ada")),
        ('<|python_tag|>{"name": "search", "parameters": {"query": "Ada"}}<|eot_id|>', Action("search", "Ada")),
        ('<think> a </think>\n\n{"name": "search", "arguments": {"query": "Ada"}} ', Action("search", "Ada")),
        ("It is <answer> Bo </answer>", Action(None, "Bo")),
        ('<answer> {"name": "search"} </answer>', Action(None, '{"name": "search"}')),
        ('I call {"name": "search", "parameters": {"query": "Ada"}}', None),
        ('{"name": "search", "parameters": {"query": "a"}} <answer> b </answer>', Action("search", "a")),
        ('{"name": "search", "parameters": {"query": "a"}', None),
        (called(query="a"), None),
    ],
)
def test_calls_in_bare_json_are_parsed(text, expected):
    assert chat(chat_templates.JSON_CALLS).parse(text) == expected


# (what a model writes for the code of a call, the code): as JSON has it, also where JSON is not strict
WRITTEN = [
    (json.dumps(CODE), CODE),
    (f'"{CODE}"', CODE),  # a real line break
    ('"if x:\n\tprint(1)"', "if x:\n\tprint(1)"),  # a real tab
    (r'"re.findall(r\'\d+\', s)"', r"re.findall(r\'\d+\', s)"),
    (r'''"re.findall(r'\d+', s)"''', r"re.findall(r'\d+', s)"),
    (r'"re.split(\"\\s|\d\", s)\nprint(\"\\n\")"', 're.split("\\s|\\d", s)\nprint("\\n")'),
    (r'"print(\"\\\\d\")"', r'print("\\d")'),
    (r'"x = \'\x41\u0041\u41\N{BULLET}\U0001F600\'"', r"x = \'\x41A\u41\N{BULLET}\U0001F600\'"),
    (r'"s = \"}{][\" # \\"', 's = "}{][" # \\'),
    (json.dumps(FENCE_IN_A_STRING), FENCE_IN_A_STRING),
    (json.dumps(LINE_OF_SPACES), LINE_OF_SPACES),
    (json.dumps(f"```py\n{LINE_OF_SPACES}\n```"), LINE_OF_SPACES),
    (json.dumps("    x = 1\n    print(x)\n"), "x = 1\nprint(x)"),  # indented as a whole
    (json.dumps("\n\tif x:\n\t\tprint(x)"), "if x:\n\tprint(x)"),
    (json.dumps("print('  two  spaces\\t\\0é😀')"), "print('  two  spaces\\t\\0é😀')"),
    (json.dumps("d = {'name': 'x', \"arguments\": {}}"), "d = {'name': 'x', \"arguments\": {}}"),
    (json.dumps("print('<answer> 7 </answer>')"), "print('<answer> 7 </answer>')"),
]


@pytest.mark.parametrize("around", ["CALL", " \nCALL\n\n", "```json\nCALL\n```", "CALL That runs it.", "[CALL]"])
@pytest.mark.parametrize("form", ["arguments", "parameters", "text", "wrapped"])
@pytest.mark.parametrize("template", [chat_templates.KEEPS, chat_templates.JSON_CALLS])
def test_the_text_of_a_call_never_changes(template, form, around):
    made = chat(template, "python")
    for written, code in WRITTEN:
        given = f'{{"code": {written}}}'
        if form == "text":  # as OpenAI's interface sends it
            given = json.dumps(given, ensure_ascii=False)
        key = "parameters" if form == "parameters" else "arguments"
        call = f'{{"name": "python", "{key}": {given}}}'
        if form == "wrapped":
            call = f'{{"id": "call_1", "type": "function", "function": {call}}}'
        text = around.replace("CALL", call)
        action = made.parse(f"<tool_call>{text}</tool_call>" if made.tagged else text + "<|eot_id|>")
        assert action == Action("python", code) and not action.several, (written, action)


A, B = (json.dumps({"name": "search", "arguments": {"query": query}}) for query in "ab")


@pytest.mark.parametrize(
    "text, expected, several",
    [
        (f"{A}\n{B}", "a", True),
        (f"{A}; {B}", "a", True),
        (f"{A}, {B}", "a", True),
        (f"[{A}, {B}]", "a", True),
        (f"[{A}]", "a", False),
        (f"{A} And then: {B}", "a", True),
        (f"{A} {B[:-9]}", "a", True),  # the second is not complete
        (f"{A}\n{A.replace('search', 'lookup')}", "a", True),
        (f"{A} and 3 more: [1, 2] {{x}}", "a", False),
        (f"{A.replace('search', 'lookup')}\n{B}", None, None),  # the first one counts
        (f"[7, {A}]", None, None),
        ("[]", None, None),
        (A[:-1], None, None),
        ('{"name": "search", "arguments": "{\\"query\\": \\"a\\"} or so"}', None, None),
        ('{"name": "search", "arguments": "[1"}', None, None),
        ('{"name": "search", "arguments": {"query": "a\n" + "b"}}', None, None),
        ('{"function": {"name": "search"}}', None, None),
        ('{"function": {"name": "lookup", "arguments": {"query": "a"}}}', None, None),
    ],
)
@pytest.mark.parametrize("template", [chat_templates.KEEPS, chat_templates.JSON_CALLS])
def test_of_several_calls_in_a_message_the_first_runs(template, text, expected, several):
    made = chat(template)
    action = made.parse(f"<tool_call>\n{text}\n</tool_call>" if made.tagged else text)
    assert action == (Action("search", expected) if expected else None)
    assert action is None or action.several is several


@pytest.mark.parametrize("name", ["KEEPS", "JSON_CALLS"])
def test_the_observation_says_that_only_the_first_call_ran(name):
    """Its sentence is no part of the tool's output, where a score might search for an answer."""
    tokenizer, seen = chat_templates.tokenizer(getattr(chat_templates, name)), {}
    close = ("<tool_call>{}</tool_call>", "{}<|eot_id|>")[name == "JSON_CALLS"]
    for calls in (A, f"{A}\n{B}"):
        script = lambda q, s, k, calls=calls: [close.format(calls), "<answer> x </answer>"][k]  # noqa: E731
        (t,), _ = play(script, tool=lambda text: 'A "town".\n', tokenizer=tokenizer, protocol="chat")
        assert (t.turns[0].tool_input, t.turns[0].tool_status) == ("a", "ok")
        seen[calls] = t.turns[0].tool_output, tokenizer.decode(t.turns[0].observation_ids)
    (alone, one), (output, several) = seen.values()
    assert alone == output and wordings.SEVERAL not in one and several.replace(wordings.SEVERAL, "") == one
    assert several.index(wordings.SEVERAL) + len(wordings.SEVERAL) == several.index("A ")


def test_a_sentence_without_room_is_left_out():
    made = chat(chat_templates.KEEPS)
    made.limit = len(made._encode("".join(made.around))) + 3
    shown, ids = made.observation("one two three", "search", wordings.SEVERAL)
    assert (shown, ids) == made.observation("one two three", "search") and len(ids) <= made.limit


def test_an_answer_inside_of_a_call_is_none():
    """The stop string ends the generation there; the call is not complete."""
    cut = """{"name": "python", "arguments": {"code": "print('<answer> 7 </answer>"""
    for template in (chat_templates.KEEPS, chat_templates.JSON_CALLS):
        made = chat(template, "python")
        assert made.parse("<tool_call>\n" * made.tagged + cut) is None
    assert chat(chat_templates.KEEPS).parse("I <tool_call> no: <answer> b </answer>") == Action(None, "b")


def test_code_in_a_call_is_taken_out_of_its_fence():
    made = chat(chat_templates.KEEPS, "python")
    assert made.parse(called("python", code=f"```python\n{CODE}\n```")) == Action("python", CODE)
    assert made.parse(called("python", code=CODE)) == Action("python", CODE)


# ---- chat: contexts


@pytest.mark.parametrize(
    "template", [chat_templates.KEEPS, chat_templates.UNTIL_USER, chat_templates.STRIPS, chat_templates.JSON_CALLS]
)
@pytest.mark.parametrize("tool", ["search", "python"])
def test_the_prompt_names_the_tool_as_the_template_does(template, tool):
    made = chat(template, tool)
    text = made.tokenizer.decode(made.prompt_ids(" Who? "))
    assert json.dumps(made.schema) in text and made.wording.chat_system in text and "Who?<|" in text
    assert made.schema["function"]["name"] == tool and "<answer>" in made.wording.chat_system
    assert text.rstrip().endswith(
        {chat_templates.JSON_CALLS: "<|end_header_id|>", chat_templates.STRIPS: "<think>"}.get(template, "assistant")
    )


SAID = {  # the model's turns, as each template writes them
    "KEEPS": '<think>\nso {0}\n</think>\n\n\n<tool_call>\n{{"name": "search", "arguments": {{"query": "{0}"}}}}\n</tool_call>',
    "UNTIL_USER": '<think>\nso {0}\n</think>\n\n<tool_call>\n{{"name": "search", "arguments": {{"query": "{0}"}}}}\n</tool_call>',
    "STRIPS": 'so {0}\n</think>\n\n<tool_call>\n{{"name": "search", "arguments": {{"query": "{0}"}}}}\n</tool_call>',
    "JSON_CALLS": '{{"name": "search", "parameters": {{"query": "{0}"}}}}',
}


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("name", list(SAID))
def test_contexts_equal_the_template_s_text_of_the_whole_conversation(name, ended):
    """Include a template that leaves out earlier thinking, with the --context that it matches."""
    tokenizer = chat_templates.tokenizer(getattr(chat_templates, name))
    end = ("<|eot_id|>" if name == "JSON_CALLS" else "<|im_end|>") * (ended or name == "JSON_CALLS")
    found = {"Ada Cole": 'Ada Cole works for\n"Nova Labs".', "Nova Labs": "Nova Labs is led by Bo Hale.\n"}
    answer = "</think>" * (name == "STRIPS") + "<answer> Bo Hale </answer>"
    script = lambda q, s, k: [*(SAID[name].format(query) + end for query in found), answer][k]  # noqa: E731
    context = "strip_think" if name == "STRIPS" else "full"
    (t,), engine = play(script, tool=found.get, tokenizer=tokenizer, protocol="chat", context=context)
    assert (t.stop, t.outcome, [turn.tool_status for turn in t.turns]) == ("answer", 1.0, ["ok", "ok", None])
    if context == "full":
        for before, after in zip(t.turns, t.turns[1:]):
            assert after.context_ids == before.context_ids + before.action_ids + before.observation_ids
    made = chat(getattr(chat_templates, name), context=context)
    messages = made._first("Who leads the firm of Ada Cole?")
    for k, (query, output) in enumerate(found.items()):
        call = [{"type": "function", "function": {"name": "search", "arguments": {"query": query}}}]
        thought = "" if name == "JSON_CALLS" else f"<think>\nso {query}\n</think>\n\n"
        messages += [message("assistant", thought, tool_calls=call), message("tool", output)]
        whole = render(tokenizer, messages, True, tools=[made.schema])
        assert tokenizer.decode(engine.seen[k + 1].ids) == whole
        assert engine.seen[k + 1].ids == tokenizer.encode(whole)


def test_the_chat_protocol_puts_the_system_text_into_the_user_message_and_finds_the_template_s_end_token():
    """Use a template as Qwen2.5's that refuses a system message and ends messages with a token that no list knows."""
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer = chat_templates.tokenizer(refuse + chat_templates.KEEPS.replace("<|im_end|>", "<|end|>"))
    script = lambda q, s, k: [called(query="Ada Cole") + "<|end|>", "<answer> Bo Hale </answer>"][k]  # noqa: E731
    (t,), engine = play(script, tokenizer=tokenizer, protocol="chat")
    made = Chat(train_grpo.Args(), tokenizer, "search")
    first = f"<|im_start|>user\n{made.wording.chat_system}\n\nWho leads the firm of Ada Cole?"
    assert tokenizer.decode(engine.seen[0].ids).startswith(first) and t.outcome == 1.0
    assert tokenizer.decode(engine.seen[1].ids).count("<|end|>") == 3  # the sampled one is not repeated


def test_an_invalid_action_is_answered_by_a_user_message():
    tokenizer = chat_templates.tokenizer(chat_templates.KEEPS)
    script = lambda q, s, k: ["I do not know.", "I do not know.<|im_end|>", "<answer> x </answer>"][k]  # noqa: E731
    (t,), engine = play(script, tokenizer=tokenizer, protocol="chat")
    made = chat()
    messages = made._first("Who leads the firm of Ada Cole?")
    for k in (1, 2):
        messages += [message("assistant", "I do not know."), message("user", made.invalid_message)]
        assert tokenizer.decode(engine.seen[k].ids) == render(tokenizer, messages, True, tools=[made.schema])
        assert (t.turns[k - 1].tool_status, t.turns[k - 1].tool_output) == ("invalid", made.invalid_message)


@pytest.mark.parametrize("template", [chat_templates.KEEPS, chat_templates.JSON_CALLS])
@pytest.mark.parametrize("output", ['"\\"\n' * 60, "é\U0001f600x" * 40, "one two three. " * 40])
def test_an_output_is_cut_and_the_text_around_it_is_not(template, output):
    for limit in range(60, 75):
        made = chat(template, max_observation_tokens=limit)
        shown, ids = made.observation(output, "search")
        text = made.tokenizer.decode(ids)
        assert text.startswith(made.around[0]) and text.endswith(made.around[1]) and limit - 3 <= len(ids) <= limit
        assert output.startswith(shown) and 0 < len(shown) < len(output)
        inside = text.removeprefix(made.around[0]).removesuffix(made.around[1])
        assert inside == (json.dumps(shown, ensure_ascii=False)[1:-1] if made.quotes else shown)


# ---- chat: refusals and notices at the start


@pytest.mark.parametrize(
    "template, changes, words",
    [
        (None, {}, "no chat template"),
        (chat_templates.WITHOUT_TOOLS, {}, "leaves the tools out"),
        (chat_templates.WITHOUT_OUTPUTS, {}, "leaves out tool outputs"),
        (chat_templates.OTHER_CALLS, {}, "calls in an unknown format"),
        (chat_templates.REFUSES, {}, "Only user and assistant roles!"),
        (chat_templates.REWRITES, {}, "differently when others follow"),
        (chat_templates.GEMMA_2, {}, "leaves the tools out"),
        (chat_templates.MISTRAL, {}, "leaves the tools out"),
        (chat_templates.MISTRAL_TOOLS, {}, "a call needs an id of 9 characters"),
        (chat_templates.PHI_3, {}, "leaves the tools out"),
        ("{{ nonsense.at.all }}", {}, "cannot be used for tool calls"),
        ("{% if %}", {}, "cannot be used for tool calls"),
        (chat_templates.KEEPS, dict(template="off"), "--template auto"),
        (chat_templates.KEEPS, dict(max_observation_tokens=16), r"--max_observation_tokens 16: .* takes \d+ tokens"),
    ],
)
def test_a_template_that_cannot_use_tools_is_refused(template, changes, words):
    with pytest.raises(SystemExit, match=words) as stopped:
        chat(template, **changes)
    assert "\n" not in str(stopped.value) and (changes or "--protocol tags" in str(stopped.value))


def test_chat_takes_no_worked_examples():
    with pytest.raises(SystemExit, match="--shots 0"):
        play(None, tokenizer=chat_templates.tokenizer(chat_templates.KEEPS), protocol="chat", shots=1)


@pytest.mark.parametrize(
    "template, context, words",
    [
        ("KEEPS", "full", None),
        ("KEEPS", "strip_think", "keeps the thinking of earlier turns, as --context full does"),
        (
            "UNTIL_USER",
            "full",
            r"until a user message follows \(here: after an invalid action\); --context full always keeps",
        ),
        ("UNTIL_USER", "window", "until a user message follows .* as --context full does; .* --context window instead"),
        ("STRIPS", "full", "leaves out the thinking of earlier turns, as --context strip_think does; .* full instead"),
        ("STRIPS", "strip_think", None),
        ("MARKS_OLD", "full", "rewrites earlier turns in its own way"),
    ],
)
def test_a_template_that_does_not_match_the_context_is_reported_in_a_line(template, context, words, monkeypatch):
    lines = []
    monkeypatch.setattr(run, "notice", lines.append)
    chat(getattr(chat_templates, template), context=context)
    assert len(lines) == (words is not None) and all("\n" not in line for line in lines)
    assert words is None or re.search(words, lines[0])
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    chat(getattr(chat_templates, template), context=context)
    assert len(lines) == (words is not None)


# ---- chat templates of other models, in the tags protocol

# name: (text of the prompt, {system} and {text} being ours; token after the model's message)
SHAPES = {
    "KEEPS": (
        "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
        "im_end|>",
    ),
    "UNTIL_USER": (
        "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
        "im_end|>",
    ),
    "JSON_CALLS": (
        "<|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024\n\n{system}<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n{text}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    "GEMMA_2": ("<bos><start_of_turn>user\n{system}\n\n{text}<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>"),
    "MISTRAL": ("<bos>[INST] {system}\n\n{text} [/INST]", "<eos>"),
    "MISTRAL_TOOLS": ("<bos>[INST] {system} [/INST][INST] {text} [/INST]", "<eos>"),
    "PHI_3": ("<|user|>\n{system}\n\n{text}<|end|>\n<|assistant|>\n", "<|end|>"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_prompt_end_tokens_and_calls_of_known_templates_in_the_tags_protocol(name):
    tokenizer = chat_templates.tokenizer(getattr(chat_templates, name))
    made = Tags(train_grpo.Args(), tokenizer, "search")
    shape, end = SHAPES[name]
    text = made.wording.instruction + "Question: Who?"
    ids = made.prompt_ids(" Who? ")
    assert tokenizer.decode(ids) == shape.format(system=made.wording.system, text=text)
    ends = [tokenizer.decode(i) for i in made.stop_ids]
    assert sum(each.endswith(end) for each in ends) == 1 and "<start_of_turn>" not in ends and "<bos>" not in ends
    assert made.parse(f"<search> a </search>{end}") == Action("search", "a")
    # Special tokens are single ids, also where the text was joined.
    assert all(tokenizer.encode(token)[0] in ids for token in re.findall(r"<bos>|<start_of_turn>|<\|\w+\|>", shape))


HEAD = chat_templates.HEAD


@pytest.mark.parametrize(
    "template, words",
    [
        ("{{ raise_exception('no\nmessages') }}", "no messages"),
        ("{% if %}", "Expected an expression"),
        ("{{ nonsense.at.all }}", "undefined"),
        ("Hello", "leaves out or changes the instruction"),
        (HEAD + "{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}", "leaves out or changes"),
        (HEAD + "{{ m.content | upper }}{% endfor %}", "leaves out or changes"),
        (HEAD + "{{ m.content[:60] }}{% endfor %}", "leaves out or changes the question"),
        (HEAD + "{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", "leaves out or changes"),
        (HEAD + "<think>{{ m.content.text }}{% endfor %}", "leaves out or changes"),
        ({"tool_use": "{{ messages }}"}, "no template is defined|no.* default"),
    ],
)
def test_a_template_that_cannot_show_a_prompt_is_refused_in_one_sentence(template, words):
    with pytest.raises(SystemExit, match=f"(?i)chat template of .*({words}).* Use --template off") as stopped:
        Tags(train_grpo.Args(), chat_templates.tokenizer(template), "search")
    assert "\n" not in str(stopped.value)
    Tags(train_grpo.Args(template="off"), chat_templates.tokenizer(template), "search")


def test_a_template_that_is_asked_for_must_exist():
    with pytest.raises(SystemExit, match=r"\(there is none\). Use --template off"):
        Tags(train_grpo.Args(template="on"), chat_templates.tokenizer(None), "search")


@pytest.mark.parametrize(
    "after, end",
    [
        ("<end_of_turn>\n", "<end_of_turn>"),
        ("\n  <|end|>\n<eos>", "<|end|>"),  # the first
        ("</tool_call><|end|>", "<|end|>"),  # a special one comes before one that is not
        ("\n</think>\n", "</think>"),  # an added token, where none is special
        ("\n### End", None),
        ("{{ raise_exception('x') if m.role == 'assistant' }}", None),
    ],
)
def test_the_token_after_a_message_is_an_end_token(after, end):
    """A fine-tuned model may have no generation config and an end token that no list knows."""
    tokenizer = chat_templates.tokenizer(HEAD + "{{ '<|user|>' + m.content }}" + after + "{% endfor %}")
    known = {"<eos>", "<|im_end|>", "<|eot_id|>"}  # of the tokenizer and common templates
    assert {tokenizer.decode(i) for i in end_ids(tokenizer)} == known | ({end} if end else set())


# ---- boxed answers, and no tool


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"So it is \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"first \boxed{1}, no, \boxed {2}", "2"),
        (r"\boxed{1} and then \boxed{2", "1"),  # the last one is not closed
        (r"<think> perhaps \boxed{1} </think> \boxed{2}", "2"),
        (r"perhaps \boxed{1} </think> nothing else", None),  # the prompt has opened the thinking
        (r"\boxed{}", None),
        ("<answer> 42 </answer>", None),
    ],
)
def test_boxed_answers_are_parsed(text, answer):
    expected = Action(None, answer) if answer else None
    assert tags("python", answer="boxed").parse(text) == tags(None, answer="boxed").parse(text) == expected
    assert chat(chat_templates.KEEPS, "python", answer="boxed").parse(text) == expected


def test_a_call_comes_before_a_boxed_answer():
    text = r"<python> print(6 * 7) </python>"
    assert tags("python", answer="boxed").parse(rf"I guess \boxed{{41}} {text}") == Action("python", "print(6 * 7)")
    call = called("python", code="6 * 7")
    assert chat(chat_templates.KEEPS, "python", answer="boxed").parse(rf"\boxed{{41}} {call}") == Action(
        "python", "6 * 7"
    )


def test_boxed_answers_end_with_the_message_and_the_prompt_asks_for_them():
    made = [
        tags("python", answer="boxed"),
        tags(None, answer="boxed"),
        chat(chat_templates.KEEPS, "python", answer="boxed"),
    ]
    for one in made:
        text = one.tokenizer.decode(one.prompt_ids("What is 3 + 4?"))
        assert r"write it inside \boxed{}" in text and "answer>" not in text and "</answer>" not in one.stop
        assert r"\boxed{answer}" in one.invalid_message
    assert made[0].stop == ["</python>", "<output>"] and made[1].stop == []


def test_without_a_tool_the_prompt_mentions_none():
    alone = tags(None)
    text = alone.tokenizer.decode(alone.prompt_ids("What is 3 + 4?"))
    assert not any(word in text for word in ("python", "search", "look up", "compute", "tool", "Call"))
    assert alone.stop == ["</answer>"] and "<think>" in text


def test_without_a_tool_answers_are_parsed_and_calls_are_invalid():
    alone = tags(None)
    assert alone.parse("<python> 1 </python>") is None and alone.parse("<answer> 7 </answer>") == Action(None, "7")
    shown, ids = alone.observation(alone.invalid_message, None)
    assert alone.tokenizer.decode(ids).strip() == alone.invalid_message


def test_without_a_tool_the_protocol_must_be_tags():
    with pytest.raises(SystemExit, match="With --tools off use --protocol tags"):
        chat(chat_templates.KEEPS, None)


def test_worked_examples_need_search_and_answers_in_tags():
    for words, tool in (({}, None), ({"answer": "boxed"}, "search")):
        with pytest.raises(SystemExit, match="--shots: the worked examples need a search task"):
            Tags(train_grpo.Args(**words), small_models.tokenizer(), tool, ("an example",))
