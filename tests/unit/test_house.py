"""Structure of the code: allowed imports, no import cycles, and budgets of lines. docs/map.md shows the imports."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {  # folder -> our packages and modules that its files may import, besides each other
    "common": (),
    "tools": ("common",),
    "tasks": ("tools", "common"),
    "view": ("tools", "common", "tasks.scores"),
}
LINES = {"train_grpo.py": 240, "train_tspo.py": 320, "train_gtpo.py": 320, "train_rtpo.py": 320, "eval.py": 160}
FOLDER_LINES = {"common": 3000}
FILE_LINES = {"common": 350, "tasks": 500, "tools": 500, "view": 500}


def modules(root=ROOT):
    """Return {name: path} of our modules: tasks.tiny.pretrain, train_grpo. A package has the name of its folder."""
    paths = [
        *root.glob("*.py"),
        *(p for folder in (*MAY_IMPORT, "runs") for p in sorted((root / folder).rglob("*.py"))),
    ]
    names = {p: ".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for p in paths}
    return {name: path for path, name in names.items()}


def imports(path, known):
    """Return our modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports hide which file is meant"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in inner}
    return found & set(known)


def graph(root=ROOT):
    known = modules(root)
    return {name: imports(path, known) for name, path in known.items()}


def is_entry(name):
    """Return whether a module is run and not imported: a script at the top, view/__main__.py, a program of runs/."""
    return "." not in name and name not in MAY_IMPORT or name == "view.__main__" or name.startswith("runs.")


def wrong_arrows(arrows):
    found = []
    for name, targets in arrows.items():
        for target in targets:
            if is_entry(name):
                runs_a_script = name.startswith("runs.") and target.startswith(("train_", "eval"))
                allowed = not is_entry(target) or runs_a_script
            else:
                folder = name.partition(".")[0]
                allowed = any(f"{target}.".startswith(f"{one}.") for one in (folder, *MAY_IMPORT[folder]))
            if not allowed:
                found.append(f"{name} -> {target}")
    return found


def circle(arrows):
    """Return a list of modules that import each other in a circle, or []."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        path.append(name)
        for target in sorted(arrows[name]):
            if found := visit(target):
                return found
        done.add(path.pop())
        return []

    return next(filter(None, map(visit, sorted(arrows))), [])


def lines(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_import_runs_the_wrong_way():
    assert wrong_arrows(graph()) == []


def test_no_file_imports_another_in_a_circle():
    assert circle(graph()) == []


def test_a_wrong_arrow_and_a_circle_inside_a_function_are_found(tmp_path):
    for folder in ("common", "tasks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "common" / "one.py").write_text("def f():\n    from common import two\n")
    (tmp_path / "common" / "two.py").write_text("from common.one import f\ndef g():\n    import tasks.three\n")
    (tmp_path / "tasks" / "three.py").write_text("")
    arrows = graph(tmp_path)
    assert wrong_arrows(arrows) == ["common.two -> tasks.three"]
    assert circle(arrows) == ["common.one", "common.two", "common.one"]


@pytest.mark.parametrize("name, most", LINES.items())
def test_a_script_stays_within_its_lines(name, most):
    assert lines(ROOT / name) <= most


@pytest.mark.parametrize("folder, most", FILE_LINES.items())
def test_files_and_folders_stay_within_their_lines(folder, most):
    sizes = {str(p.relative_to(ROOT)): lines(p) for p in (ROOT / folder).rglob("*.py")}
    assert {name: size for name, size in sizes.items() if size > most} == {}
    assert sum(sizes.values()) <= FOLDER_LINES.get(folder, 10**9)


def test_importing_tasks_loads_nothing_heavy():
    import subprocess
    import sys

    code = "import sys, tasks; print([m for m in ('torch', 'transformers', 'numpy', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_map_shows_the_arrows_and_the_budgets():
    page = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    for folder, allowed in MAY_IMPORT.items():
        cells = ", ".join(f"`{name}`" for name in allowed) or "nothing of ours"
        assert f"| `{folder}` | {cells} |" in page
    assert f"| `common/` | {FOLDER_LINES['common']:,}, and {FILE_LINES['common']} a file |" in page
    for name, most in LINES.items():
        shown = name if name in ("train_grpo.py", "eval.py") else "the other train scripts"
        assert f"| `{shown}` | {most} |" in page or f"| {shown} | {most} |" in page
