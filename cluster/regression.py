"""Whether a candidate is slower than a baseline, judged by samples of both: decisions alone, without files and clocks.

    mann_whitney   how probable so large a shift is where there is none
    compare        one metric of one candidate: worse, better, or neither
    in_a_row       how many of the latest comparisons found it worse; a `Rule` says how many are a failure

Every sample is a cost, such as a time: more is worse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import erfc, sqrt
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cluster.errors import ConfigError, DataError

Samples: TypeAlias = Sequence[float] | npt.NDArray[np.float64]
Verdict: TypeAlias = Literal["regression", "improvement", "unchanged"]
LEAST_SAMPLES = 5
"""The fewest samples on either side. With four on both, no outcome is less probable than 1 in 70: nothing would ever be significant."""


@dataclass(frozen=True)
class Rule:
    """A regression is a median that is worse by more than the share `tolerance`, with a p-value below `significance`.

    A metric fails when its latest `failures` comparisons are all regressions: samples of one run share that run's luck, which the test does
    not see. Raises ConfigError at values that make no sense.
    """

    tolerance: float = 0.1
    significance: float = 0.01
    failures: int = 3

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < float("inf"):
            raise ConfigError(f"a tolerance of {self.tolerance} makes no sense; 0.1 lets the median be a tenth worse")
        if not 0 < self.significance < 1:
            raise ConfigError(f"a significance of {self.significance} makes no sense; it is a probability, such as 0.01")
        if self.failures < 1:
            raise ConfigError(f"failures must be 1 or more, not {self.failures}; 1 fails at the first regression")

    def fails(self, row: int) -> bool:
        """Whether so many regressions of a metric in a row are a failure."""
        return row >= self.failures


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric: medians of both sides, the candidate's over the baseline's, and how probable so large a rise is by chance (one-sided)."""

    metric: str
    baseline_median: float
    candidate_median: float
    ratio: float
    p_value: float
    verdict: Verdict


def compare(metric: str, baseline: Samples, candidate: Samples, rule: Rule = Rule()) -> Comparison:
    """The comparison of one metric. Raises DataError where there are too few samples, or a sample is no cost."""
    before, after = _median(metric, "baseline", baseline), _median(metric, "candidate", candidate)
    if before == 0:
        raise DataError(f"the baseline's median of {metric} is 0, to which there is no ratio; measure something that costs time")
    ratio, p_value = after / before, mann_whitney(candidate, baseline)
    verdict: Verdict = "unchanged"
    if ratio > 1 + rule.tolerance and p_value < rule.significance:
        verdict = "regression"
    elif ratio < 1 / (1 + rule.tolerance) and mann_whitney(baseline, candidate) < rule.significance:
        verdict = "improvement"
    return Comparison(metric, before, after, ratio, p_value, verdict)


def mann_whitney(larger: Samples, smaller: Samples) -> float:
    """The p-value of the one-sided U test that `larger` is stochastically larger than `smaller`.

    U counts the pairs in which the value of `larger` is the larger one, ties half. Where both are of one distribution, U is nearly normal,
    with mean nm / 2 and variance nm (N + 1 - sum(t^3 - t) / (N (N - 1))) / 12 for N = n + m values, t of which are the same.
    Sources: Mann and Whitney, "On a Test of Whether one of Two Random Variables is Stochastically Larger than the Other", Annals of
    Mathematical Statistics 18 (1947); the variance with ties, and the correction by 1/2 for U's steps, as in Hollander and Wolfe,
    "Nonparametric Statistical Methods", section 4.1. Raises DataError where a side is empty.
    """
    n, m = len(larger), len(smaller)
    if not n or not m:
        raise DataError(f"{n} and {m} samples cannot be compared; give some of each")
    _, places, ties = np.unique(np.concatenate([larger, smaller]), return_inverse=True, return_counts=True)
    if len(ties) == 1:
        return 1.0  # all values are the same: U has no variance
    ranks = np.cumsum(ties) - (ties - 1) / 2  # those that are the same share the mean of their ranks
    u = float(ranks[places[:n]].sum()) - n * (n + 1) / 2
    total, tied = n + m, float((ties.astype(np.float64) ** 3 - ties).sum())
    variance = n * m / 12 * (total + 1 - tied / (total * (total - 1)))
    return erfc((u - n * m / 2 - 0.5) / sqrt(2 * variance)) / 2


def in_a_row(verdicts: Sequence[Verdict]) -> int:
    """How many regressions there are in a row at the end of `verdicts`, which are in the order of time."""
    return sum(1 for _ in takewhile(lambda verdict: verdict == "regression", reversed(verdicts)))


def _median(metric: str, side: str, samples: Samples) -> float:
    values = np.asarray(samples, np.float64)
    if len(values) < LEAST_SAMPLES:
        raise DataError(f"the {side} has {len(values)} samples of {metric}; the test needs {LEAST_SAMPLES} on either side: measure longer")
    if not (np.isfinite(values) & (values >= 0)).all():
        raise DataError(f"the {side}'s samples of {metric} hold values that are no costs: they must be finite, and 0 or more")
    return float(np.median(values))
