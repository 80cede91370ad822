"""What is computed at once for a prompt, and then code by code, is what transformers computes in one pass over everything."""

import gc

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from cluster.bundle import DECODER
from cluster.registry import BACKENDS, resolve
from cluster.trie import Trie
from cluster.values import GenerateRequest, UserState
from integrations.decoder.files import load_soft_prompt
from tests.bundles import make_generative_bundle, random_sequence

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # Inductor's own remarks, as vllm imports it
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq:ResourceWarning"),  # vllm leaves one at each shutdown
]
ITEMS, LONGEST = 120, 64
NOBODY = np.array([], np.int32)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_generative_bundle(tmp_path_factory.mktemp("generates") / "tiny", items=ITEMS, sizes=(6, 6), prompt_length=LONGEST)


@pytest.fixture(scope="module", params=[("vllm", "float32"), ("vllm", "bfloat16"), ("torch_beam", "float32")], ids="-".join)
def served(request, bundle):
    """(a generator that is loaded, how far how many of its best items may be off, its name)."""
    name, dtype = request.param
    generator = resolve(BACKENDS["generator"][name])(dtype=dtype)
    if not (availability := generator.get_availability(bundle)).ok:
        pytest.skip(f"{name}: {availability.reason}")
    generator.load(bundle)
    yield generator, (1e-4, ITEMS) if dtype == "float32" else (0.08, 20), name  # bf16 keeps 8 bits, and the levels add up
    generator.close()
    gc.collect()


def asked(length, seed=0):
    states = np.random.default_rng([seed, length]).normal(size=(length, 16)).astype(np.float32)
    user = UserState(states / np.linalg.norm(states, axis=1, keepdims=True), random_sequence(length, items=ITEMS, seed=seed))
    return GenerateRequest(user, ITEMS, ITEMS, NOBODY)


def whole_pass(bundle, user):
    """Item -> log p, all items' prompts and codes through transformers in one go; renormalised over all siblings."""
    ids, lm = bundle.semantic_ids, LlamaForCausalLM.from_pretrained(bundle.path / DECODER).eval()
    tokens = torch.from_numpy(ids.tokens[1:]).long()
    with torch.no_grad():
        rows = load_soft_prompt(bundle).of([user])[0].expand(ITEMS, -1, -1)
        logits = lm(inputs_embeds=torch.cat([rows, lm.model.embed_tokens(tokens)], dim=1)).logits[:, len(user) - 1 : -1]
    scores = np.zeros(ITEMS)
    for item, path in enumerate(tokens):
        for level in range(ids.levels):
            siblings = sorted({int(other[level]) for other in tokens if torch.equal(other[:level], path[:level])})
            scores[item] += float(logits[item, level, path[level]] - logits[item, level, siblings].logsumexp(0))
    return scores


@pytest.mark.parametrize("length", [1, 5, 31, 32, 33, LONGEST])
def test_steps_after_one_prefill_equal_one_whole_pass_of_transformers(served, bundle, length):
    generator, (tolerance, best), _ = served
    answer = generator.infer(asked(length))
    assert sorted(answer.items.tolist()) == list(range(1, ITEMS + 1))
    expected = whole_pass(bundle, asked(length).user)[answer.items - 1]
    assert answer.log_probs[:best] == pytest.approx(expected[:best], abs=tolerance)


def test_vllm_computes_a_prompts_whole_blocks_once_and_then_only_the_codes(served, bundle):
    generator, _, name = served
    if name != "vllm":
        pytest.skip(f"{name} has no engine that counts its rows")
    before = generator.queue()
    generator.infer(asked(LONGEST, seed=9))
    after = generator.queue()
    looked_up, found = (after[count] - before[count] for count in ("prefix_cache_queries", "prefix_cache_hits"))
    view = Trie.of(bundle.semantic_ids).view()
    questions = [
        sum(len(view.children(level, node)) > 1 for node in range(nodes))
        for level, nodes in enumerate((1, *map(len, view.trie.tokens[:-1])))
    ]
    assert looked_up == sum(count * (LONGEST + level) for level, count in enumerate(questions))
    assert looked_up - found == LONGEST + sum(count * level for level, count in enumerate(questions))
