"""The scripts side by side: shared code is identical, and each script differs from train_grpo.py by its idea only.

    python tests/unit/test_diff.py --fix       copies the shared code from train_grpo.py into the other scripts, and
                                          writes the diff of each script into its page under docs/

A script names the blocks that it overrides in its docstring (`Overrides: collect, compute_advantages.`). Blocks are the
imports, the shared arguments (down to `# ---- algorithm`), each function, and the last lines. A user's copy of a script
is not checked.
"""

import ast
import dataclasses
import difflib
import importlib
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]  # also as a program: --fix

import commands  # noqa: E402

REFERENCE = "train_grpo.py"
ALGORITHM = "    # ---- algorithm\n"
SCRIPTS = tuple(name for name in commands.known_to_git("train_*.py", "more/train_*.py") if name != REFERENCE)


def blocks(source):
    """Return {name: text} of a script's blocks, in order. Joined, the texts are the script."""
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    names, starts = ["docstring", "imports"], [0, tree.body[0].end_lineno]
    for node in tree.body:
        type_checking = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"  # belongs to the imports
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.If)) and not type_checking:
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
    """Return the words after `Overrides:` in a script's docstring: blocks, and arguments with another default."""
    docstring = ast.get_docstring(ast.parse(script))
    return set(re.findall(r"\w+", re.search(r"Overrides: (.*?)\.", docstring, re.DOTALL)[1]))


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def idea(script):
    """Return the lines that count as changes: all except the docstring, the algorithm's own arguments (methods of Args
    do count) and functions that only compute metrics (folr_stats)."""
    parts = blocks(script)
    fields = re.compile(r'^    \w+: .*\n    """.*"""\n', re.MULTILINE)
    parts["algorithm"] = fields.sub("", parts["algorithm"]).strip("\n")
    counted = (text for name, text in parts.items() if name != "docstring" and not name.endswith("_stats"))
    return "\n".join(counted).splitlines()


def difference(script):
    """Return the added and removed lines of the unified diff from train_grpo.py to a script, including empty ones."""
    lines = difflib.unified_diff(idea(read(REFERENCE)), idea(script), n=0, lineterm="")
    return [line for line in lines if line[0] in "+-" and not line.startswith(("+++", "---"))]


def page_of(name):
    return f"docs/{name.removeprefix('train_').removesuffix('.py')}.md"


def fixed_page(page, name):
    """Return a docs page with the diff from train_grpo.py to its script between the marks."""
    texts = [read(script).splitlines() for script in (REFERENCE, name)]
    for i, text in enumerate(texts):
        texts[i] = text[text.index('"""', 1) + 1 :]  # without the docstrings
    lines = difflib.unified_diff(*texts, REFERENCE, name, n=1, lineterm="")
    head, begin, rest = page.partition("<!-- diff: begin -->\n")
    _, end, tail = rest.partition("<!-- diff: end -->")
    assert begin and end, f"{page_of(name)} has no marks for the diff"
    return head + begin + "\n".join(["```diff", *lines, "```", ""]) + end + tail


def fixed(script):
    """Return the script with every shared block of train_grpo.py."""
    parts, reference = blocks(script), blocks(read(REFERENCE))
    own = overrides(script) | {"docstring", "algorithm"}
    return "".join(text if name in own or name not in reference else reference[name] for name, text in parts.items())


@pytest.mark.parametrize("name", SCRIPTS)
def test_blocks_that_are_not_overridden_are_those_of_the_reference(name):
    parts, reference = blocks(read(name)), blocks(read(REFERENCE))
    shared = set(reference) - {"docstring", "algorithm"}
    differing = {block for block in shared if parts.get(block) != reference[block]}
    assert differing == overrides(read(name)) & shared, (
        "python tests/unit/test_diff.py --fix, or name the block in Overrides"
    )
    assert [block for block in parts if block in reference] == list(reference)  # in the same order


def test_main_is_the_same_in_every_script():
    assert len({blocks(read(name))["main"] for name in (REFERENCE, *SCRIPTS)}) == 1


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_at_most_60_changed_lines(name):
    assert 0 < len(difference(read(name))) <= 60


def test_blocks_of_one_name_are_equal_in_all_scripts_that_add_them():
    seen = {}
    for name in SCRIPTS:
        for block, text in blocks(read(name)).items():
            if block not in blocks(read(REFERENCE)):
                assert seen.setdefault(block, text) == text, block


def flags(name):
    """Return {flag: {"type", "default", "help"}} of a script, read from its classes: Sampling, Shared, Args."""
    docs = {}
    for file in ("common/args.py", name):
        for node in ast.parse(read(file)).body:
            if isinstance(node, ast.ClassDef):
                for item, after in zip(node.body, [*node.body[1:], None]):
                    if isinstance(item, ast.AnnAssign):
                        docs[item.target.id] = ast.unparse(item.annotation), after.value.value
    fields = dataclasses.fields(importlib.import_module(name.removesuffix(".py").replace("/", ".")).Args)
    return {f.name: {"type": docs[f.name][0], "default": f.default, "help": docs[f.name][1]} for f in fields}


@pytest.mark.parametrize("name", [REFERENCE, *SCRIPTS])
def test_shared_arguments_have_the_reference_s_default_unless_the_script_says_otherwise(name):
    ours, theirs = flags(name), flags(REFERENCE)
    assert {k for k in theirs if ours[k]["default"] != theirs[k]["default"]} == overrides(read(name)) & set(theirs)
    own = re.findall(r"^    (\w+): ", blocks(read(name))["algorithm"], re.MULTILINE)
    assert list(ours) == list(theirs) + [flag for flag in own if flag not in theirs]  # the algorithm's own come last


@pytest.mark.parametrize("name", ["eval.py", REFERENCE, *SCRIPTS])
def test_the_flags_are_those_of_the_frozen_list(name):
    """Compare names, types, defaults and meanings. A change of tests/unit/flags.json is a change of the interface."""
    frozen = json.loads(read("tests/unit/flags.json"))[name]
    found = flags(name)
    assert set(found) == set(frozen)
    for flag, frozen_flag in frozen.items():
        assert found[flag] == frozen_flag, flag


def test_a_script_reads_every_flag_that_it_declares():
    declared = re.findall(r"^    (\w+): ", blocks(read(REFERENCE))["Args"], re.MULTILINE)
    assert [flag for flag in declared if f"args.{flag}" not in read(REFERENCE)] == [] and len(declared) > 10


def test_fix_copies_shared_code_and_leaves_the_idea_alone():
    script = read("train_tspo.py")
    spoilt = script.replace("# ---- 3. credit", "# ---- 3. whatever").replace("return k, gold\n", 'return k, "mine"\n')
    assert spoilt != script and fixed(spoilt) == script.replace("return k, gold\n", 'return k, "mine"\n')


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_shows_the_diff_of_its_script(name):
    assert fixed_page(read(page_of(name)), name) == read(page_of(name)), "python tests/unit/test_diff.py --fix"


def test_the_diff_in_the_readme_is_that_of_the_script():
    shown = read("README.md").partition("```diff\n")[2].partition("```")[0].splitlines()
    ours, reference = (set(read(name).splitlines()) for name in ("train_tspo.py", REFERENCE))
    for line in filter(str.strip, shown):
        text = line[1:]
        if text.strip():
            assert (line[0] == "-" or text in ours) and (line[0] == "+" or text in reference), line
    assert len([line for line in shown if line[0] == "+"]) > 15


def test_every_link_of_the_pages_leads_to_a_file():
    for name in commands.known_to_git("README.md", "CHANGELOG.md", "docs/*.md"):
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", read(name)):
            assert (ROOT / name).parent.joinpath(target).exists(), f"{name}: {target}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--fix"]:
        sys.exit(__doc__)
    for target, made in [
        *((name, fixed) for name in SCRIPTS),
        *((page_of(name), lambda page, name=name: fixed_page(page, name)) for name in SCRIPTS),
    ]:
        before = read(target)
        if (after := made(before)) != before:
            (ROOT / target).write_text(after, encoding="utf-8")
            print(f"{target}: brought up to date with train_grpo.py")
