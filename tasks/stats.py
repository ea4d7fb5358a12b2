"""Statistics of evaluations: pass@k, and bootstrap intervals over questions."""

import math

import numpy

RESAMPLES = 10_000


def budgets(n):
    """The k of pass@k that n samples can tell: 1, 2, 4, ... and n."""
    return sorted({2**i for i in range(n.bit_length())} | {n}) if n else []


def pass_at(k, n, right):
    """The chance that one of k trajectories is right, without bias, from n of which `right` are.  arXiv:2107.03374, eq. (1)"""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def summarise(figures, seed):
    """{figure: {"mean", "low", "high"}} of a list with a dict of figures for each question.

    low, high: the 95 % percentile bootstrap interval of the mean; questions are drawn with replacement, all figures of one together.
    """
    table = numpy.array([list(of_one.values()) for of_one in figures], dtype=float)
    rng = numpy.random.default_rng(seed)
    means = [table[rng.integers(len(table), size=len(table))].mean(0) for _ in range(RESAMPLES)]
    rows = (table.mean(0), *numpy.quantile(means, (0.025, 0.975), axis=0))
    return {name: dict(zip(("mean", "low", "high"), map(float, column))) for name, *column in zip(figures[0], *rows)}


def compare(results, seed):
    """{system: summary} of {system: figures of each question}, and of two systems the second's paired difference to the first."""
    summaries = {system: summarise(figures, seed) for system, figures in results.items()}
    if len(results) == 2:
        first, second = results
        pairs = zip(results[first], results[second])
        summaries[f"{second} - {first}"] = summarise([{name: b[name] - a[name] for name in a} for a, b in pairs], seed)
    return summaries
