"""Hand-made groups for tests of credit, and a comparison with numbers of four decimals."""

from common.turns import Group, Question, Trajectory, Turn


def turn(tool="search", status="ok", output="", text=""):
    return Turn([1], [2], [-0.5], text=text, tool=tool, tool_input=text, tool_output=output, tool_status=status)


def answer():
    return turn(tool=None, status=None)


def group(trajectories, question="Who?", golds=("Ada Cole",), info=None):
    """Return a group. trajectories: (outcome, [turns]) each."""
    made = [Trajectory(list(turns), outcome=outcome) for outcome, turns in trajectories]
    return Group(Question("q", question, list(golds)), made, info or {})


def same(got, expected, atol=2e-4):
    """Assert that two lists of lists agree in shape and to atol, None only with None, and return True."""
    assert [len(row) for row in got] == [len(row) for row in expected], (got, expected)
    for row, other in zip(got, expected):
        for a, b in zip(row, other):
            assert (a is None) == (b is None) and (a is None or abs(a - b) <= atol), (got, expected)
    return True
