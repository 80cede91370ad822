"""Prompts of which the first rows are kept: the same answers from fewer computed rows, within a budget, for their owner alone."""

import logging
from typing import get_args
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.engines.stage_rules import generator_disagreement
from cluster.errors import BackendUnavailable, ConfigError, UnknownChoice
from cluster.values import GenerateRequest, SamplingOptions, UserSequence, UserState
from integrations.hstu.state.eviction import PolicyName
from integrations.hstu.state.pool import PagePool
from integrations.hstu.state.radix import RadixStates
from integrations.torch_beam import prompts
from integrations.torch_beam.continuations import prefill
from integrations.torch_beam.generator import TorchBeamGenerator
from integrations.torch_beam.llama import Llama
from integrations.torch_beam.prompts import PAGE_ROWS, row_keys
from pipelines.generation import prompt as started
from tests.bundles import make_generative_bundle, random_sequence
from tests.repetitions import times
from tests.unit.test_torch_beam import soften

LONGEST = 40
ROW_BYTES = 2 * 2 * 64 * 4  # layers, key and value, hidden, float32
SEEN = WeakKeyDictionary()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_generative_bundle(tmp_path_factory.mktemp("prompts") / "tiny", prompt_length=LONGEST)


def loaded(bundle, *, dtype="float32", cache_bytes=0, **options):
    generator = TorchBeamGenerator(dtype, cache_bytes=cache_bytes, **options)
    generator.load(bundle)
    return generator


@pytest.fixture(scope="module")
def whole(bundle):
    """Computes every prompt whole."""
    return loaded(bundle, prompt_bytes=0)


@pytest.fixture
def keeping(bundle):
    return loaded(bundle)


def prompt(length, seed=0, start=0):
    """The rows from `start` on of the first `length` events of one user, who asks a day after the last of them."""
    history = random_sequence(LONGEST + 8, seed=seed)
    states = np.random.default_rng(seed).normal(size=(LONGEST + 8, 16)).astype(np.float32)
    states /= np.linalg.norm(states, axis=1, keepdims=True)
    rows = slice(start, length)
    columns = history.items[rows], history.timestamps[rows], history.actions[rows], history.values[rows]
    return UserState(states[rows], UserSequence(*columns, request_time=int(history.timestamps[length - 1]) + 86_400))


def asked(length, user_id="ada", *, seed=0, start=0, **rest):
    rest = {"k": 10, "beam": 20, "blocked": np.empty(0, np.int32), **rest}
    return GenerateRequest(prompt(length, seed, start), user_id=user_id, **rest)


def edited(request, row):
    states = request.state.states.copy()
    states[row] = -states[row]
    return replace(request, state=UserState(states, request.state.sequence))


def agree(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.items.tolist() == other.items.tolist()
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def found(generator):
    """How many of the prompts' rows were kept, since the last time."""
    before, now = SEEN.get(generator, 0), generator.kept()["hit_rows"]
    SEEN[generator] = now
    return now - before


def test_a_prompt_that_grew_is_computed_from_what_was_its_last_row_on(keeping, whole):
    kept = []
    for length in (5, 6, 14, 15, 16, 17, 18, 31, LONGEST):
        agree([keeping.infer(asked(length))], [whole.infer(asked(length))])
        kept.append((length, found(keeping)))
    assert kept == [(5, 0), (6, 4), (14, 5), (15, 13), (16, 14), (17, 15), (18, 16), (31, 17), (LONGEST, 30)]


def test_a_prompt_asked_about_again_costs_its_last_row_whenever_that_is(keeping, whole):
    later = asked(20)
    later = replace(later, state=UserState(later.state.states, replace(later.state.sequence, request_time=2_000_000_000)))
    agree([keeping.infer(asked(20)), keeping.infer(later)], [whole.infer(asked(20)), whole.infer(later)])
    assert found(keeping) == 19
    assert not np.array_equal(row_keys(later.state)[-1], row_keys(asked(20).state)[-1]), "the pause is another"


@pytest.mark.parametrize(("row", "used"), [(0, 0), (3, 0), (15, 0), (16, 16), (17, 17), (29, 29), (30, 30)])
def test_after_an_edit_whole_pages_before_it_are_used_and_rows_of_the_last_page(keeping, whole, row, used):
    keeping.infer(asked(31))
    found(keeping)
    agree([keeping.infer(edited(asked(31), row))], [whole.infer(edited(asked(31), row))])
    assert found(keeping) == used
    agree([keeping.infer(asked(31))], [whole.infer(asked(31))])


def test_states_of_any_width_are_part_of_the_key_to_their_last_bit():
    user = prompt(3)
    for width in (1, 2, 15, 16):
        narrow = UserState(user.states[:, :width].copy(), user.sequence)
        keys = row_keys(narrow)
        narrow.states[1, width - 1] = np.nextafter(narrow.states[1, width - 1], np.float32(2))
        assert (row_keys(narrow) != keys).any(axis=1).tolist() == [False, True, False]


@pytest.mark.parametrize("change", ["item", "value", "pause"])
def test_every_input_of_a_row_is_part_of_its_key(change):
    user = prompt(6)
    sequence = user.sequence
    items, values, times = sequence.items.copy(), sequence.values.copy(), sequence.timestamps.copy()
    if change == "item":
        items[2] = items[2] % 200 + 1
    elif change == "value":
        values[2] = 4.0
    else:
        times[3:] += 10 * (times[3] - times[2])
    other = UserState(user.states, replace(sequence, items=items, values=values, timestamps=times))
    assert (row_keys(user) != row_keys(other)).any(axis=1)[:3].tolist() == [False, False, True]


def test_a_long_history_is_prompted_from_an_event_that_stays_the_first_for_as_many_requests_as_a_step_has(keeping, whole):
    everything = prompt(LONGEST + 8)
    kept = []
    for length in range(LONGEST - 1, LONGEST + 9):
        user = started(everything.states[:length], last_events_of(everything.sequence, length), LONGEST)
        assert user.sequence.items.tolist() == everything.sequence.items[length - len(user) : length].tolist()
        request = replace(asked(1), state=user)
        agree([keeping.infer(request)], [whole.infer(request)])
        kept.append((len(user), found(keeping)))
    assert kept == [(39, 0), (40, 38), (36, 0), (37, 35), (38, 36), (39, 37), (40, 38), (36, 0), (37, 35), (38, 36)]


def last_events_of(sequence, length):
    columns = (column[:length] for column in (sequence.items, sequence.timestamps, sequence.actions, sequence.values))
    return UserSequence(*columns, request_time=int(sequence.timestamps[length - 1]) + 86_400)


@pytest.mark.parametrize(("events", "states", "longest", "rows_of_prompt"), [
    (1, 1, 64, 1), (64, 64, 64, 64), (65, 64, 64, 57), (72, 64, 64, 64), (73, 64, 64, 57), (5_000, 64, 64, 64), (5_001, 200, 64, 57),
    (200, 1, 64, 1), (9, 9, 3, 3), (9, 9, 1, 1),
])  # fmt: skip
def test_a_prompt_holds_what_its_step_leaves_of_the_latest_events(events, states, longest, rows_of_prompt):
    history = random_sequence(events)
    user = started(np.arange(states, dtype=np.float32).reshape(-1, 1), history, longest)
    assert user.states[:, 0].tolist() == list(range(states - rows_of_prompt, states))
    assert user.sequence.items.tolist() == history.items[-rows_of_prompt:].tolist()
    assert user.sequence.request_time == history.request_time


def test_a_prompt_that_slid_by_one_event_finds_nothing(keeping, whole):
    keeping.infer(asked(LONGEST))
    agree([keeping.infer(asked(LONGEST + 1, start=1))], [whole.infer(asked(LONGEST + 1, start=1))])
    assert found(keeping) == 0


def test_nothing_is_read_across_users_or_tenants_and_nothing_is_kept_of_nobody(keeping, whole):
    for user, tenant in (("ada", "a"), ("bob", "a"), ("ada", "b"), ("", "a"), ("", "a")):
        agree([keeping.infer(asked(20, user, tenant=tenant))], [whole.infer(asked(20, user, tenant=tenant))])
        assert found(keeping) == 0
    assert keeping.kept()["users"] == 3


def test_users_of_a_tenant_share_whole_pages_of_equal_beginnings_where_that_is_asked_for(bundle, whole):
    sharing = loaded(bundle, share_prompts=True)
    kept = []
    for user, tenant in (("ada", "a"), ("bob", "a"), ("ada", "b"), ("bob", "a")):
        agree([sharing.infer(asked(20, user, tenant=tenant))], [whole.infer(asked(20, user, tenant=tenant))])
        kept.append(found(sharing))
    assert kept == [0, PAGE_ROWS, 0, 19]
    sharing.forget("a", "ada")
    agree([sharing.infer(asked(20, "bob", tenant="a"))], [whole.infer(asked(20, "bob", tenant="a"))])
    assert found(sharing) == 19


def test_a_batch_of_users_of_whom_more_less_and_nothing_is_kept_answers_as_if_nothing_were(keeping, whole):
    lengths = dict(enumerate((1, 2, 9, 17, 30, LONGEST)))
    keeping.batch_infer([asked(max(1, length - 3), str(seed), seed=seed) for seed, length in lengths.items() if seed != 4])
    found(keeping)
    requests = [asked(length, str(seed), seed=seed) for seed, length in lengths.items()]
    requests += [asked(12, "", seed=9), asked(12, "new", seed=10), asked(LONGEST, "5", seed=5)]
    requests += [replace(one, sampling=SamplingOptions(seed=1)) for one in requests]
    agree(keeping.batch_infer(requests), whole.batch_infer(requests))
    assert found(keeping) >= 5 + 13 + 2 * 36
    agree(keeping.batch_infer(requests[::-1]), whole.batch_infer(requests[::-1]))
    assert keeping.kept()["failures"] == 0


def test_what_no_row_of_a_prompt_fills_reaches_no_answer(keeping, whole, monkeypatch):
    made = Llama._memory  # noqa: SLF001 - what a row holds before it is written

    def full_of_nan(*arguments):
        memory = made(*arguments)
        for layer in memory.layers:
            layer.fill_(torch.nan)
        return memory

    monkeypatch.setattr(Llama, "_memory", full_of_nan)
    for more in (0, 2):
        requests = [asked(length + more, str(length), seed=length) for length in (3, 20, 36)]
        agree(keeping.batch_infer(requests), whole.batch_infer(requests))
    assert keeping.kept()["failures"] == 0
    assert found(keeping) == 2 + 19 + 35


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_a_budget_of_few_pages_evicts_and_answers_the_same(bundle, whole, policy):
    generator = loaded(bundle, prompt_bytes=5 * PAGE_ROWS * ROW_BYTES, prompt_policy=policy)
    for turn in range(3):
        requests = [asked(10 + 3 * turn + user, str(user), seed=user) for user in range(7)]
        agree(generator.batch_infer(requests), whole.batch_infer(requests))
        agree([generator.infer(one) for one in requests], [whole.infer(one) for one in requests])
    kept = generator.kept()
    assert kept["evictions"] > 0
    assert 0 < kept["used_bytes"] <= kept["budget_bytes"]
    assert (kept["held"], kept["failures"]) == (0, 0)


def test_a_budget_of_a_few_rows_keeps_those_and_one_of_none_is_refused(bundle, whole):
    generator = loaded(bundle, prompt_bytes=3 * ROW_BYTES)
    agree([generator.infer(asked(9)) for _ in range(2)], [whole.infer(asked(9))] * 2)
    assert found(generator) == 3
    with pytest.raises(BackendUnavailable, match=rf"prompt_bytes \({ROW_BYTES - 1}\) holds no row of a prompt \({ROW_BYTES} bytes\)"):
        loaded(bundle, prompt_bytes=ROW_BYTES - 1)


turns = st.lists(st.tuples(st.integers(1, LONGEST), st.integers(0, 2), st.booleans()), min_size=1, max_size=4)


@settings(max_examples=times(25, 8), deadline=None)
@given(st.lists(turns, min_size=1, max_size=5), st.sampled_from([6, 1000]))
def test_answers_whatever_is_asked_in_whatever_order_as_if_nothing_were_kept(bundle, whole, batches, pages):
    generator = loaded(bundle, prompt_bytes=pages * PAGE_ROWS * ROW_BYTES)
    for batch in batches:
        requests = [asked(length, str(user), seed=user) for length, user, _ in batch]
        requests = [edited(one, len(one.state) // 2) if change else one for one, (_, _, change) in zip(requests, batch, strict=True)]
        agree(generator.batch_infer(requests), whole.batch_infer(requests))
    assert (generator.kept()["failures"], generator.kept()["held"]) == (0, 0)


def test_answers_the_same_when_the_logits_of_prompts_are_recalled_as_well(bundle, whole):
    generator = loaded(bundle, cache_bytes=1 << 20)
    requests = [asked(length, k=20, beam=beam) for length in (8, 8, 9) for beam in (20, 30)]
    agree([generator.infer(one) for one in requests], [whole.infer(one) for one in requests])
    assert generator.kept()["logits_hits"] > 0
    assert generator.kept()["hit_rows"] > 0


def test_bfloat16_keeps_its_own_bits_and_agrees_with_float32_where_the_model_is_not_extreme(tmp_path):
    bundle = make_generative_bundle(tmp_path / "gentle", prompt_length=LONGEST)
    soften(bundle)
    exact, rounded, again = (loaded(bundle, dtype=dtype, prompt_bytes=size) for dtype, size in (
        ("float32", 0), ("bfloat16", 1 << 20), ("bfloat16", 0),
    ))  # fmt: skip
    for length in (12, 15, 24):
        request = asked(length, k=200, beam=200)
        kept = rounded.infer(request)
        assert generator_disagreement(exact.infer(request), kept) == ""
        assert generator_disagreement(again.infer(request), kept) == ""
    assert found(rounded) == 11 + 14
    page_bytes = PAGE_ROWS * ROW_BYTES // 2
    assert rounded.kept()["used_bytes"] == 2 * page_bytes


def test_forgets_one_user_one_tenant_or_everybody(bundle):
    generator = loaded(bundle, cache_bytes=1 << 20)
    everyone = [("ada", "a"), ("bob", "a"), ("cyd", "a"), ("ada", "b"), ("bob", "b")]
    for place, (user, tenant) in enumerate(everyone):
        generator.infer(asked(10 + place, user, tenant=tenant))
    assert generator.kept()["rows"] == 9 + 10 + 11 + 12 + 13
    entries = generator.kept()["logits_entries"]
    assert generator.forget("a", "ada") == 9 + entries, "whose logits they are is not known"
    assert (generator.kept()["users"], generator.kept()["logits_entries"]) == (4, 0)
    assert (generator.forget("a", "ada"), generator.forget("a", "eve")) == (0, 0)
    assert generator.forget_tenant("a") == 10 + 11
    assert generator.kept()["users"] == 2
    assert generator.forget_everything() == 12 + 13
    assert (generator.kept()["users"], generator.kept()["used_bytes"]) == (0, 0)
    found(generator)
    generator.infer(asked(10, "ada", tenant="a"))
    assert found(generator) == 0


class Broken(Exception):
    pass


@pytest.mark.parametrize("step", ["match", "read", "commit", "release"])
def test_a_store_that_fails_costs_no_answer_and_is_reported_once(keeping, whole, caplog, monkeypatch, step):
    keeping.infer(asked(10))

    def broken(*_arguments, **_more):
        raise Broken("the store is broken")

    breaks = (PagePool, "gather") if step == "read" else (RadixStates, step)
    computed_whole = []
    with monkeypatch.context() as patch:
        patch.setattr(*breaks, broken)
        patch.setattr(prompts, "prefill", lambda *arguments: computed_whole.append(arguments) or prefill(*arguments))
        with caplog.at_level(logging.ERROR):
            for length in (12, 13):
                patch.setattr(RadixStates, "forget", lambda _store, _owner: 0)  # so that there is something to read the second time
                agree([keeping.infer(asked(length))], [whole.infer(asked(length))])
    assert [record.message for record in caplog.records] == [
        "kept prompts could not be used; such prompts are computed whole (said once for Broken)"
    ]
    assert keeping.kept()["failures"] == 2
    assert len(computed_whole) == (0 if step == "commit" else 2), "rows that were read are used, though others cannot be kept"
    agree([keeping.infer(asked(14))], [whole.infer(asked(14))])


def test_a_user_with_rows_that_cannot_be_kept_costs_the_others_of_the_batch_none_of_theirs(keeping, whole, caplog, monkeypatch):
    users, commit = {"ada": 1, "bob": 2, "cyd": 3}, RadixStates.commit
    keeping.batch_infer([asked(10, user, seed=seed) for user, seed in users.items()])
    found(keeping)

    def refused(store, held, *more):
        if held.owner.user == "bob":
            raise Broken("bob's rows cannot be kept")
        commit(store, held, *more)

    requests = [asked(12, user, seed=seed) for user, seed in users.items()]
    with caplog.at_level(logging.CRITICAL), monkeypatch.context() as patch:
        patch.setattr(RadixStates, "commit", refused)
        agree(keeping.batch_infer(requests), whole.batch_infer(requests))
    assert found(keeping) == 27
    assert (keeping.kept()["failures"], keeping.kept()["users"], keeping.kept()["rows"]) == (1, 2, 22)
    agree(keeping.batch_infer(requests), whole.batch_infer(requests))
    assert found(keeping) == 22


def test_rows_that_are_damaged_are_forgotten_and_the_prompt_is_computed_whole(keeping, whole, caplog, monkeypatch):
    keeping.infer(asked(10))
    gathered = PagePool.gather

    def damaged(pool, *which):
        pool.view("0", 0)[3] = np.nan
        gathered(pool, *which)

    with caplog.at_level(logging.CRITICAL), monkeypatch.context() as patch:
        patch.setattr(PagePool, "gather", damaged)
        agree([keeping.infer(asked(12))], [whole.infer(asked(12))])
    assert (keeping.kept()["failures"], keeping.kept()["rows"]) == (1, 0)
    found(keeping)
    agree([keeping.infer(asked(length)) for length in (13, 14)], [whole.infer(asked(length)) for length in (13, 14)])
    assert found(keeping) == 12


def test_says_what_it_keeps_and_nothing_where_that_is_off(bundle, keeping, whole):
    keeping.infer(asked(10))
    kept = keeping.kept()
    assert (kept["users"], kept["rows"], kept["used_bytes"]) == (1, 9, PAGE_ROWS * ROW_BYTES)
    assert all(isinstance(value, float) for value in kept.values())
    assert (whole.kept(), whole.forget("default", "ada"), whole.forget_everything()) == ({}, 0, 0)


def test_options_that_mean_nothing_are_refused():
    with pytest.raises(UnknownChoice, match="unknown prompt_policy 'arc'; choose from fifo, lfu, lru"):
        TorchBeamGenerator(prompt_policy="arc")
    for name in ("prompt_bytes", "cache_bytes"):
        with pytest.raises(ConfigError, match=rf"{name} \(-1\) must be at least 0"):
            TorchBeamGenerator(**{name: -1})
        with pytest.raises(ConfigError, match=rf"{name} \('64MB'\) must be a whole number, written out"):
            TorchBeamGenerator(**{name: "64MB"})
