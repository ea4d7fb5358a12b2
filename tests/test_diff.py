"""The scripts side by side: what they share is the same text, and each differs from train_grpo.py by its idea only.

    python tests/test_diff.py --fix       copies what is shared from train_grpo.py into the other scripts and into eval.py, and
                                          writes the diff of each script into its page under docs/

A script names the blocks it overrides in its docstring (`Overrides: collect, compute_advantages.`). Blocks are the imports, the shared
arguments (down to `# ---- algorithm`), each function, and the last lines. A user's copy of a script is not looked at.
"""

import ast
import difflib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("train_tspo.py", "train_gtpo.py", "train_rtpo.py")
ALGORITHM = "    # ---- algorithm\n"
OWN_WORDS = (
    "task",
    "resume",
    "adapter",
    "limit",
    "out",
    "seed",
    "temperature",
    "gpu_memory",
)  # arguments that mean another thing in eval.py


def blocks(source):
    """{name: text} of a script in its order; all texts together are the script."""
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    names, starts = ["docstring", "imports"], [0, tree.body[0].end_lineno]
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.If)):
            names.append(getattr(node, "name", "__main__"))
            starts.append(min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) - 1)
    texts = ["".join(lines[a:b]) for a, b in zip(starts, [*starts[1:], len(lines)])]
    found = dict(zip(names, texts, strict=True))
    assert "".join(found.values()) == source and ALGORITHM in found["Args"]
    parts = {}
    for name, text in found.items():
        shared, marker, own = text.partition(ALGORITHM)
        parts |= {"Args": shared + marker, "algorithm": own} if name == "Args" else {name: text}
    return parts


def overrides(script):
    """The words after `Overrides:` in a script's docstring: names of blocks, and of arguments with another default."""
    docstring = ast.get_docstring(ast.parse(script))
    return set(re.findall(r"\w+", re.search(r"Overrides: (.*?)\.", docstring, re.DOTALL)[1]))


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def idea(script):
    """What counts as a script's changed lines: all but the docstring and the algorithm's own arguments; methods of Args do count."""
    parts = blocks(script)
    fields = re.compile(r'^    \w+: .*\n    """.*"""\n', re.MULTILINE)
    parts["algorithm"] = fields.sub("", parts["algorithm"]).strip("\n")
    return "\n".join(text for name, text in parts.items() if name != "docstring").splitlines()


def difference(script):
    """Lines of the unified diff from train_grpo.py to a script that were added or removed, empty ones included."""
    lines = difflib.unified_diff(idea(read("train_grpo.py")), idea(script), n=0, lineterm="")
    return [line for line in lines if line[0] in "+-" and not line.startswith(("+++", "---"))]


def page_of(name):
    return f"docs/{name.removeprefix('train_').removesuffix('.py')}.md"


def fixed_page(page, name):
    """A docs page with the diff from train_grpo.py to its script between the marks."""
    texts = [read(script).splitlines() for script in ("train_grpo.py", name)]
    for i, text in enumerate(texts):
        texts[i] = text[text.index('"""', 1) + 1 :]  # the docstrings are prose
    lines = difflib.unified_diff(*texts, "train_grpo.py", name, n=1, lineterm="")
    head, begin, rest = page.partition("<!-- diff: begin -->\n")
    _, end, tail = rest.partition("<!-- diff: end -->")
    assert begin and end, f"{page_of(name)} has no marks for the diff"
    return head + begin + "\n".join(["```diff", *lines, "```", ""]) + end + tail


def argument(source, name):
    """The text of one argument: its line and its docstring."""
    return re.search(rf'    {name}: .*\n    """(?s:.*?)"""\n', source)[0]


def arguments(source):
    shared = blocks(source)["Args"] if ALGORITHM in source else source
    return re.findall(r'^    (\w+): .*\n    """', shared, re.MULTILINE)


def fixed(script):
    """The script with every shared block as it stands in train_grpo.py."""
    parts, reference = blocks(script), blocks(read("train_grpo.py"))
    own = overrides(script) | {"docstring", "algorithm"}
    return "".join(text if name in own or name not in reference else reference[name] for name, text in parts.items())


def fixed_eval(source):
    reference = read("train_grpo.py")
    for name in set(arguments(source)) & set(arguments(reference)) - set(OWN_WORDS):
        source = source.replace(argument(source, name), argument(reference, name))
    return source


@pytest.mark.parametrize("name", SCRIPTS)
def test_blocks_that_are_not_overridden_are_those_of_the_reference(name):
    parts, reference = blocks(read(name)), blocks(read("train_grpo.py"))
    shared = set(reference) - {"docstring", "algorithm"}
    differing = {block for block in shared if parts.get(block) != reference[block]}
    assert differing == overrides(read(name)) & shared, (
        "python tests/test_diff.py --fix, or name the block in Overrides"
    )
    assert [block for block in parts if block in reference] == list(reference)  # in the same order


def test_main_is_the_same_in_every_script():
    assert len({blocks(read(name))["main"] for name in ("train_grpo.py", *SCRIPTS)}) == 1


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_at_most_60_changed_lines(name):
    assert 0 < len(difference(read(name))) <= 60


def test_what_two_scripts_add_under_one_name_is_one_text():
    seen = {}
    for name in SCRIPTS:
        for block, text in blocks(read(name)).items():
            if block not in blocks(read("train_grpo.py")):
                assert seen.setdefault(block, text) == text, block


@pytest.mark.parametrize("name", SCRIPTS)
def test_shared_arguments_have_the_reference_s_default_unless_the_script_says_otherwise(name):
    import dataclasses
    import importlib

    ours, theirs = (
        {f.name: f.default for f in dataclasses.fields(importlib.import_module(module).Args)}
        for module in (name.removesuffix(".py"), "train_grpo")
    )
    assert {k for k in theirs if ours[k] != theirs[k]} == overrides(read(name)) & set(theirs)
    assert list(ours)[: len(theirs)] == list(theirs)  # the algorithm's own come last
    for block in (blocks(read(name))["algorithm"],):
        assert set(re.findall(r"^    (\w+): ", block, re.MULTILINE)) >= set(ours) - set(theirs)


def test_eval_says_the_same_of_the_arguments_it_shares():
    ours, reference = read("eval.py"), read("train_grpo.py")
    shared = set(arguments(ours)) & set(arguments(reference)) - set(OWN_WORDS)
    assert len(shared) > 15
    for name in shared:
        assert argument(ours, name) == argument(reference, name), f"{name}: python tests/test_diff.py --fix"


def test_fix_copies_what_is_shared_and_leaves_the_idea_alone():
    script = read("train_tspo.py")
    spoilt = script.replace("# ---- 3. credit", "# ---- 3. whatever").replace("return k, gold\n", 'return k, "mine"\n')
    assert spoilt != script and fixed(spoilt) == script.replace("return k, gold\n", 'return k, "mine"\n')


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_shows_the_diff_of_its_script(name):
    assert fixed_page(read(page_of(name)), name) == read(page_of(name)), "python tests/test_diff.py --fix"


if __name__ == "__main__":
    if sys.argv[1:] != ["--fix"]:
        sys.exit(__doc__)
    for target, made in [
        *((name, fixed) for name in SCRIPTS),
        ("eval.py", fixed_eval),
        *((page_of(name), lambda page, name=name: fixed_page(page, name)) for name in SCRIPTS),
    ]:
        before = read(target)
        if (after := made(before)) != before:
            (ROOT / target).write_text(after, encoding="utf-8")
            print(f"{target}: brought up to date with train_grpo.py")
