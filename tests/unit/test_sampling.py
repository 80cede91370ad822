import subprocess
import sys
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import BackendFailed, InvalidRequest
from integrations.torch_beam.sampling import RandomStream, Sampler, SamplingOptions, nucleus_by_sorting, scale
from tests.repetitions import times

NINF = -np.inf
needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed (pip install numba)")
PIVOT = pytest.param("pivot", marks=needs_numba)
both_ways = pytest.mark.parametrize("way", [PIVOT, "sort"])


def sampler_of(way):
    return Sampler(pivot=way == "pivot")


def kernels():
    return pytest.importorskip("integrations.torch_beam.pivot")


def draw(sampler, logits, options, streams=None):
    """Tokens of rows given as lists or arrays, all by the same options unless there is one a row."""
    logits = torch.as_tensor(np.asarray(logits, np.float32))
    options = [options] * len(logits) if isinstance(options, SamplingOptions) else options
    return sampler.draw(logits, options, streams or [RandomStream(7)] * len(logits)).tokens.tolist()


def draw_many(sampler, logits, options, count, seed=0):
    """(count,) tokens of one row of logits, from one stream."""
    stream = RandomStream(seed)
    rows = torch.as_tensor(np.asarray(logits, np.float32)).expand(500, -1)
    return np.concatenate([sampler.draw(rows, [options] * 500, [stream] * 500).tokens.numpy() for _ in range(count // 500)])


# ---- the oracle: a full sort in exact arithmetic


def oracle_nucleus(logits, weights, options):
    """The set of tokens that may be drawn, given the weights."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if options.temperature == 0:
        return set(ranked[:1])
    ranked = ranked[: options.top_k or None]
    enough = Fraction(options.top_p * float(sum(Fraction(float(weights[token])) for token in ranked)))
    nucleus, mass = set(), Fraction(0)
    for token in ranked:
        if mass < enough and weights[token] > 0:
            nucleus.add(token)
        mass += Fraction(float(weights[token]))
    return nucleus


def oracle_distribution(logits, options):
    """(V,) probabilities, from weights in float64."""
    logits = np.asarray(logits, np.float64)
    weights = np.exp((logits - logits.max()) / options.temperature)
    kept = np.isin(np.arange(len(logits)), list(oracle_nucleus(logits, weights, options)))
    return weights * kept / (weights * kept).sum()


def weights_of(way, logits, options):
    """(V,) what the sampler makes of the logits."""
    logits = np.asarray(logits, np.float32)
    if way == "sort":
        everything = SamplingOptions(options.temperature or 1.0)
        masses, order = nucleus_by_sorting(torch.from_numpy(logits)[None], [everything])
        weights = np.empty(len(logits))
        weights[order[0].numpy()] = masses[0].numpy()
        return weights
    pivot = kernels()
    weights, blocks = np.empty_like(logits), np.empty(-(-len(logits) // pivot.BLOCK))
    pivot.weigh(logits, logits.max(), np.float32(scale(options) or 1), weights, blocks)
    return weights


def chi_square_excess(tokens, probabilities):
    """The statistic over its critical value, which one of a million honest samples exceeds (Wilson and Hilferty, 1931).

    Neighbours share a cell until about 10 draws are expected in it.
    """
    counts, expected = np.bincount(tokens, minlength=len(probabilities)), probabilities * len(tokens)
    assert not counts[expected == 0].any(), "a token outside of the nucleus was drawn"
    _, cells = np.unique(expected.cumsum() // 10, return_inverse=True)
    counts, expected = np.bincount(cells, counts), np.bincount(cells, expected)
    counts, expected = counts[expected > 1], expected[expected > 1]
    if not (freedom := len(expected) - 1):
        return 0.0
    critical = freedom * (1 - 2 / (9 * freedom) + 4.753 * np.sqrt(2 / (9 * freedom))) ** 3
    return ((counts - expected) ** 2 / expected).sum() / critical


# ---- options


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.5),
    ],
)
def test_refuses_an_option_outside_its_range_by_name_and_value(field, value):
    with pytest.raises(InvalidRequest, match=f"sampling.{field}: must be .*{value}") as refused:
        SamplingOptions(**{field: value})
    assert refused.value.field == f"sampling.{field}"


def test_takes_the_ends_of_every_range():
    SamplingOptions(temperature=0, top_k=0, top_p=1.0, seed=None)
    SamplingOptions(temperature=1e300, top_k=10**30, top_p=1e-300, seed=2**64 - 1)


# ---- which tokens


small_logits = st.lists(st.sampled_from([0.0, -0.5, -1.0, NINF]), min_size=1, max_size=8).filter(lambda row: max(row) > NINF)
options_of_all_kinds = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.integers(0, 9),
    top_p=st.one_of(st.sampled_from([0.25, 0.5, 0.75, 1.0]), st.floats(0, 1, exclude_min=True)),
)


@both_ways
@given(logits=small_logits, options=options_of_all_kinds)
@settings(max_examples=times(60, 15))
def test_draws_each_token_of_the_nucleus_and_no_other(way, logits, options):
    drawn = set(draw_many(sampler_of(way), logits, options, 1000).tolist())
    assert drawn == oracle_nucleus(logits, weights_of(way, logits, options), options)


@st.composite
def long_rows(draw):
    """Rows over several blocks of the kernel: few values and so many ties, or all different; some tokens forbidden."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    size, values = draw(st.integers(1, 1600)), draw(st.sampled_from([1, 2, 5, None]))
    spread = draw(st.sampled_from([0.0, 1.0, 5.0, 40.0]))
    row = random.normal(size=size) * spread if values is None else random.integers(0, values, size) * spread
    row[1:][random.random(size - 1) < draw(st.sampled_from([0.0, 0.1, 0.99]))] = NINF
    return row.astype(np.float32)


long_options = st.builds(
    SamplingOptions,
    temperature=st.floats(0.2, 5),
    top_k=st.one_of(st.just(0), st.integers(1, 1700)),
    top_p=st.floats(0, 1, exclude_min=True),
)


@needs_numba
@given(logits=long_rows(), options=long_options)
@settings(max_examples=times(60, 15))
def test_the_kernels_judge_every_token_as_a_full_sort_does(logits, options):
    pivot = kernels()
    weights, size = weights_of("pivot", logits, options), len(logits)
    blocks, index, logit = np.empty(-(-size // pivot.BLOCK)), 0, np.float32(NINF)
    if 0 < options.top_k < size:
        last = pivot.kth(logits, options.top_k, np.empty(options.top_k, np.int64))
        logit, index = logits[last], last + 1
    enough = options.top_p * pivot.mass_above(logits, weights, logit, index, blocks)
    within = [t for t in range(size) if weights[t] > 0 and (logits[t] > logit or (logits[t] == logit and t < index))]
    nucleus = {t for t in within if pivot.mass_above(logits, weights, logits[t], t, blocks) < enough}
    assert nucleus == oracle_nucleus(logits, weights, options)


@given(logits=long_rows(), options=long_options)
@settings(max_examples=times(60, 15))
def test_the_sort_keeps_what_exact_arithmetic_keeps(logits, options):
    masses, order = nucleus_by_sorting(torch.from_numpy(logits)[None], [options])
    assert set(order[masses > 0].tolist()) == oracle_nucleus(logits, weights_of("sort", logits, options), options)


@both_ways
def test_keeps_the_lower_ids_of_equal_logits_at_the_edge_of_both_cuts(way):
    logits = [1.0, 0.0, 3.0, 3.0, 3.0, 3.0]
    sampler = sampler_of(way)
    assert set(draw_many(sampler, logits, SamplingOptions(top_k=3), 500)) == {2, 3, 4}
    assert set(draw_many(sampler, np.zeros(10), SamplingOptions(top_p=0.5), 500)) == {0, 1, 2, 3, 4}
    assert set(draw_many(sampler, np.zeros(10), SamplingOptions(top_k=6, top_p=0.5), 500)) == {0, 1, 2}


@both_ways
def test_temperature_0_takes_the_first_of_the_most_probable(way):
    assert draw(sampler_of(way), [[0, 5, 5, 1], [NINF, NINF, 2, 2]], SamplingOptions(temperature=0)) == [1, 2]


@both_ways
def test_the_temperature_acts_before_top_p(way):
    logits = [2.0, 1.0, 0.0]  # the first has .67 of the mass at temperature 1, and .42 at 4
    sampler = sampler_of(way)
    assert set(draw_many(sampler, logits, SamplingOptions(1.0, top_p=0.6), 500)) == {0}
    assert set(draw_many(sampler, logits, SamplingOptions(4.0, top_p=0.6), 500)) == {0, 1}


@both_ways
def test_top_p_is_of_the_mass_that_top_k_left(way):
    sampler = sampler_of(way)
    assert set(draw_many(sampler, np.zeros(100), SamplingOptions(top_p=0.5), 2000)) == set(range(50))
    assert set(draw_many(sampler, np.zeros(100), SamplingOptions(top_k=4, top_p=0.5), 500)) == {0, 1}


@both_ways
@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-6, 1e6, 1e45, 1e300])
def test_extreme_temperatures_and_logits_neither_break_nor_draw_the_forbidden(way, temperature):
    sampler, flat = sampler_of(way), temperature > 1
    drawn = set(draw_many(sampler, [NINF, 3.0, 1.0, NINF, 3.0], SamplingOptions(temperature), 500))
    assert drawn == ({1, 2, 4} if flat else {1, 4})
    assert set(draw_many(sampler, [3e38, -3e38, NINF], SamplingOptions(), 500)) == {0}


# ---- how often


SHAPES = {
    "flat, 7": np.zeros(7),
    "normal, 7": np.random.default_rng(1).normal(size=7),
    "normal, 300": np.random.default_rng(2).normal(size=300) * 2,
    "peaked, 5000": np.concatenate([[9.0], np.random.default_rng(3).normal(size=4999)]),
    "flat, 5000": np.zeros(5000),
    "normal, 5000": np.random.default_rng(4).normal(size=5000),
    "heavy ties, 5000": np.random.default_rng(5).integers(0, 3, 5000).astype(float),
    "ends of blocks, 1025": np.where(np.isin(np.arange(1025), [0, 511, 512, 1023, 1024]), 2.0, NINF),
    "nine of ten forbidden, 5000": np.where(np.random.default_rng(6).random(5000) < 0.1, np.random.default_rng(7).normal(size=5000), NINF),
}
CUTS = {
    "nothing": SamplingOptions(),
    "top_p .9": SamplingOptions(top_p=0.9),
    "top_p .2, many refusals": SamplingOptions(top_p=0.2),
    "hot, top_p .5": SamplingOptions(2.0, top_p=0.5),
    "top_k 5": SamplingOptions(top_k=5),
    "cold, top_k 40, top_p .8": SamplingOptions(0.7, top_k=40, top_p=0.8),
}


@both_ways
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_draws_as_often_as_the_oracle_says(way, shape, cut):
    logits = np.asarray(SHAPES[shape], np.float32)
    tokens = draw_many(sampler_of(way), logits, CUTS[cut], 1_000 if way == "sort" and len(logits) > 2_000 else 10_000)
    assert chi_square_excess(tokens, oracle_distribution(logits, CUTS[cut])) < 1


@both_ways
def test_the_chi_square_test_notices_a_slightly_wrong_distribution(way):
    logits = SHAPES["normal, 300"]
    tokens = draw_many(sampler_of(way), logits, SamplingOptions(temperature=1.1), 10_000)
    assert chi_square_excess(tokens, oracle_distribution(logits, SamplingOptions(temperature=1.1))) < 1
    assert chi_square_excess(tokens, oracle_distribution(logits, SamplingOptions(temperature=1.0))) > 1


@both_ways
def test_pairs_of_successive_draws_are_independent(way):
    tokens = draw_many(sampler_of(way), np.zeros(16), SamplingOptions(top_p=0.5), 20_000)
    assert chi_square_excess(tokens[::2] * 8 + tokens[1::2], np.full(64, 1 / 64)) < 1


@both_ways
@pytest.mark.parametrize(("bits", "expected"), [(0, 600), (2**64 - 1, 1400)])
def test_the_least_and_the_greatest_random_number_draw_a_token_that_has_weight(way, bits, expected):
    class Fixed(RandomStream):
        def bits(self):
            return bits

    logits = np.full((1, 2000), -200.0)
    logits[0, [600, 1000, 1400]] = 0
    assert draw(sampler_of(way), logits, SamplingOptions(), [Fixed(0)]) == [expected]


# ---- by which path


@needs_numba
@pytest.mark.parametrize(
    ("logits", "options", "path"),
    [
        ([5.0, 0.0, 0.0], SamplingOptions(temperature=0), "dominant"),
        ([5.0, 0.0, 0.0], SamplingOptions(top_p=0.9), "dominant"),
        ([5.0, 0.0, 0.0], SamplingOptions(top_k=2, top_p=0.9), "dominant"),
        ([0.0, NINF, NINF], SamplingOptions(), "dominant"),
        ([5.0, 0.0, 0.0], SamplingOptions(top_p=0.99), "pivot"),
        ([5.0, 0.0, 0.0], SamplingOptions(), "pivot"),
        ([5.0, 0.0, 0.0], SamplingOptions(top_k=3), "pivot"),
        ([5.0, 0.0, 0.0], SamplingOptions(top_k=2), "top_k"),
        ([0.0, 0.0, 0.0], SamplingOptions(top_k=1, top_p=0.5), "top_k"),
    ],
)
def test_takes_the_first_path_that_suffices(logits, options, path):
    sampler = Sampler()
    draw(sampler, [logits], options)
    assert sampler.paths == {path: 1}


def test_sorts_with_a_reason_where_numba_is_absent(monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "integrations.torch_beam.pivot", raising=False)
    monkeypatch.delattr("integrations.torch_beam.pivot", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    sampler = Sampler()
    assert draw(sampler, [[NINF, 0.0]], SamplingOptions()) == [1]
    assert sampler.paths == {"sort": 1}
    assert "numba" in sampler.why_sorting
    assert "pip install numba" in sampler.why_sorting
    assert sampler.why_sorting in caplog.text


@needs_numba
@pytest.mark.parametrize(("left", "error"), [(b"", "EOFError"), (b"\x80\x05\x95", "UnpicklingError")], ids=["emptied", "cut"])
def test_sorts_with_a_reason_where_a_file_of_numbas_cache_is_damaged(monkeypatch, tmp_path, caplog, left, error):
    kernels()  # what is imported now comes back after the test
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    monkeypatch.delitem(sys.modules, "integrations.torch_beam.pivot")
    monkeypatch.delattr("integrations.torch_beam.pivot")
    kernel = kernels().draw_rows  # read from the cache before anything is compiled
    directory, line, python = kernel.stats.cache_path, kernel.py_func.__code__.co_firstlineno, sys.version_info
    Path(directory, f"pivot.draw_rows-{line}.py{python.major}{python.minor}.nbi").write_bytes(left)
    sampler = Sampler()
    assert draw(sampler, [[NINF, 0.0]], SamplingOptions()) == [1]
    assert sampler.paths == {"sort": 1}
    assert f"({error}: " in sampler.why_sorting
    assert f"(*.nbi, *.nbc) in {directory}" in sampler.why_sorting
    assert sampler.why_sorting in caplog.text


def test_importing_the_sampler_does_not_import_numba():
    code = "import sys, integrations.torch_beam.sampling; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- whose randomness


MIXED = [
    SamplingOptions(),
    SamplingOptions(0.5, top_p=0.3),
    SamplingOptions(2.0, top_k=20),
    SamplingOptions(0),
    SamplingOptions(1.5, top_k=200, top_p=0.9),
    SamplingOptions(top_p=0.05),
]


def mixed_rows():
    rows = np.random.default_rng(8).normal(size=(len(MIXED), 3000)).astype(np.float32)
    rows[1, ::3] = NINF
    return torch.from_numpy(rows)


@both_ways
def test_the_same_seeds_repeat_the_same_tokens_and_others_do_not(way):
    logits, options = np.zeros((1, 1000)), SamplingOptions(top_p=0.5)

    def tokens(seed):
        stream = RandomStream(seed)
        return [draw(sampler_of(way), logits, options, [stream])[0] for _ in range(20)]

    assert tokens(1) == tokens(1)
    assert len(set(tokens(1))) > 10
    assert sum(one == other for one, other in zip(tokens(1), tokens(2), strict=True)) < 5
    assert tokens(None) != tokens(None)


@both_ways
def test_what_a_row_draws_depends_on_neither_its_neighbours_nor_the_order(way):
    rows, seeds, sampler = mixed_rows(), range(len(MIXED)), sampler_of(way)

    def drawn(order):
        got = sampler.draw(rows[order], [MIXED[i] for i in order], [RandomStream(seeds[i]) for i in order])
        return dict(zip(order, zip(got.tokens.tolist(), got.log_probs.tolist(), strict=True), strict=True))

    together = drawn(list(seeds))
    assert drawn(list(reversed(seeds))) == together
    assert drawn([3, 0, 5, 2, 4, 1]) == together
    assert {i: drawn([i])[i] for i in seeds} == together


@both_ways
def test_every_row_takes_as_much_of_its_stream_whatever_its_path(way):
    sampler, flat, peaked = sampler_of(way), np.zeros((1, 1000)), np.array([[9.0] + [0.0] * 999])
    after = set()
    for logits, options in [(flat, SamplingOptions(top_p=0.01)), (peaked, SamplingOptions(0)), (flat, SamplingOptions(top_k=9))]:
        stream = RandomStream(5)
        draw(sampler, logits, options, [stream])
        after.add(draw(sampler, flat, SamplingOptions(), [stream])[0])
    assert len(after) == 1


@both_ways
def test_rows_that_share_a_stream_read_it_in_their_order(way):
    one_by_one, stream = RandomStream(3), RandomStream(3)
    sampler, flat = sampler_of(way), np.zeros((4, 1000))
    expected = [draw(sampler, flat[:1], SamplingOptions(), [one_by_one])[0] for _ in range(4)]
    assert draw(sampler, flat, SamplingOptions(), [stream] * 4) == expected


# ---- log probabilities


@both_ways
def test_log_probabilities_are_the_models_own_whatever_was_cut(way):
    rows = mixed_rows()
    drawn = sampler_of(way).draw(rows, MIXED, [RandomStream(i) for i in range(len(MIXED))])
    expected = rows.double().log_softmax(dim=1).gather(1, drawn.tokens[:, None]).squeeze(1)
    assert drawn.log_probs.dtype == torch.float32
    assert drawn.log_probs.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


# ---- what cannot be drawn from


@both_ways
@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ([NINF] * 3, "forbids every token"),
        ([0, np.nan, 1], "holds nan"),
        ([NINF, np.nan, NINF], "holds nan"),
        ([0, np.inf, 0], "holds inf"),
    ],
)
def test_names_a_row_that_cannot_be_drawn_from_and_reads_no_stream(way, row, problem):
    sampler, stream, untouched = sampler_of(way), RandomStream(1), RandomStream(1)
    with pytest.raises(BackendFailed, match=f"row 1 of 3 of the logits {problem}"):
        draw(sampler, [[0, 0, 0], row, [0, 0, 0]], SamplingOptions(), [stream] * 3)
    assert stream.bits() == untouched.bits()
    assert not sampler.paths


@both_ways
@pytest.mark.parametrize(("shape", "options", "streams"), [((2, 3), 1, 2), ((2, 3), 2, 1), ((3,), 3, 3), ((1, 0), 1, 1)])
def test_refuses_shapes_that_do_not_fit(way, shape, options, streams):
    with pytest.raises(ValueError, match="they must be"):
        sampler_of(way).draw(torch.zeros(shape), [SamplingOptions()] * options, [RandomStream(0)] * streams)


@both_ways
def test_draws_nothing_for_no_rows(way):
    drawn = sampler_of(way).draw(torch.empty(0, 5), [], [])
    assert drawn.tokens.shape == drawn.log_probs.shape == (0,)


# ---- memory


@needs_numba
def test_reuses_its_arrays_and_grows_them_to_the_next_power_of_two():
    sampler = Sampler()

    def where(vocabulary, rows=2, top_k=10):
        draw(sampler, np.zeros((rows, vocabulary)), SamplingOptions(top_k=top_k))
        return {name: array.ctypes.data for name, array in sampler.buffers._held.items()}  # noqa: SLF001 - where its memory lies

    first = where(3000)
    assert where(3000) == where(2000, rows=7, top_k=5) == where(7) == first
    assert where(4096, top_k=11)["weights"] == first["weights"]
    grown = where(4097, top_k=20)
    assert grown["weights"] != first["weights"]
    assert where(8192, top_k=20) == grown


@needs_numba
def test_is_not_affected_by_what_its_arrays_hold():
    rows = mixed_rows()

    def drawn(sampler):
        got = sampler.draw(rows, MIXED, [RandomStream(i) for i in range(len(MIXED))])
        return got.tokens.tolist(), got.log_probs.tolist()

    fresh, used = Sampler(), Sampler()
    used.draw(torch.randn(3, 9000), MIXED[:3], [RandomStream(0)] * 3)
    for array in used.buffers._held.values():  # noqa: SLF001 - its memory is spoilt
        array.view(np.uint8).fill(0x7F)  # huge as integers and floats alike
    assert drawn(used) == drawn(fresh)


@both_ways
def test_leaves_the_logits_and_earlier_results_as_they_are(way):
    rows, sampler = mixed_rows(), sampler_of(way)
    before = rows.clone()
    first = sampler.draw(rows, MIXED, [RandomStream(0)] * len(MIXED))
    kept = first.tokens.clone(), first.log_probs.clone()
    sampler.draw(rows.flip(0), MIXED, [RandomStream(1)] * len(MIXED))
    assert torch.equal(rows, before)
    assert torch.equal(first.tokens, kept[0])
    assert torch.equal(first.log_probs, kept[1])


@both_ways
def test_takes_logits_in_any_layout_and_precision(way):
    rows, sampler = mixed_rows().bfloat16(), sampler_of(way)
    plain = draw(sampler, rows.float().numpy(), MIXED, [RandomStream(i) for i in range(len(MIXED))])
    strided = torch.stack([rows, torch.zeros_like(rows)], dim=1)[:, 0].requires_grad_()
    for logits in (strided, rows.double(), rows.float().T.contiguous().T):
        assert sampler.draw(logits, MIXED, [RandomStream(i) for i in range(len(MIXED))]).tokens.tolist() == plain


# ---- the kernels' arithmetic


@needs_numba
@given(logits=long_rows(), temperature=st.floats(0.2, 5))
@settings(max_examples=times(40, 10))
def test_weights_are_those_of_a_softmax_and_sum_exactly_in_any_order(logits, temperature):
    weights = weights_of("pivot", logits, SamplingOptions(temperature))
    expected = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    assert weights[logits.argmax()] == 1
    assert weights == pytest.approx(expected, rel=3e-5, abs=2.0**-41)  # float32's rounding of a logit of 200 over the temperature
    exact = sum(map(Fraction, weights.tolist()))
    assert Fraction(float(weights.sum(dtype=np.float64))) == Fraction(float(weights[::-1].cumsum(dtype=np.float64)[-1])) == exact
