"""Statistics of evaluations: pass@k, and bootstrap intervals over questions."""

import math

import numpy

RESAMPLES = 10_000


def budgets(n: int) -> list[int]:
    """Return the k for which n samples estimate pass@k: 1, 2, 4, ... and n."""
    return sorted({2**i for i in range(n.bit_length())} | {n}) if n else []


def pass_at(k: int, n: int, right: int) -> float:
    """Return the unbiased estimate of pass@k from n trajectories, `right` of them right.  arXiv:2107.03374, eq. (1)"""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def summarise(figures: list[dict[str, float]], seed: int) -> dict[str, dict[str, float]]:
    """Return {figure: {"mean", "low", "high"}} of a list with a dict of figures for each question.

    low, high: the 95 % percentile bootstrap interval of the mean. Questions, each with all its figures, are drawn with
    replacement.
    """
    table = numpy.array([list(row.values()) for row in figures], dtype=float)
    rng = numpy.random.default_rng(seed)
    means = [table[rng.integers(len(table), size=len(table))].mean(0) for _ in range(RESAMPLES)]
    rows = (table.mean(0), *numpy.quantile(means, (0.025, 0.975), axis=0))
    return {name: dict(zip(("mean", "low", "high"), map(float, column))) for name, *column in zip(figures[0], *rows)}


def compare(results: dict[str, list[dict[str, float]]], seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return {system: summary} of {system: figures of each question}.

    With two systems there is also the summary of the paired differences, second minus first.
    """
    summaries = {system: summarise(figures, seed) for system, figures in results.items()}
    if len(results) == 2:
        first, second = results
        pairs = zip(results[first], results[second])
        summaries[f"{second} - {first}"] = summarise([{name: b[name] - a[name] for name in a} for a, b in pairs], seed)
    return summaries
