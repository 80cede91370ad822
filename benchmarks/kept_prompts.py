"""What keeping users' prompts is worth by the decoder's size: `OMP_NUM_THREADS=1 python -m benchmarks.kept_prompts [--rounds 40]`.

Users of random decoders of the shipped sizes come back with 32 events, then each time with one more until the prompt of 64 is almost full,
then with 32 again, which are kept. Two `torch_beam` generators answer the same requests in turns, one keeps prompts and one does not;
neither recalls logits. The medians are printed and filed in benchmarks/results.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.first_gpu_bundles import beginning, history
from benchmarks.reporting import Machine, dated, table
from cluster.bundle import Bundle
from cluster.values import GenerateRequest, UserState
from integrations.decoder.config import PRESETS
from integrations.hstu.random_bundles import make_generative_bundle
from integrations.torch_beam.generator import TorchBeamGenerator

ITEMS, CODES, VOCABULARY, PROMPT = 3_000, (256, 256), 1_024, 64
TOP, BEAM = 10, 20
USERS = (1, 8)
KEPT_BYTES = 256 << 20
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what keeping users' prompts is worth.")
    parser.add_argument("--rounds", type=int, default=40)
    rounds, load = parser.parse_args().rounds, os.getloadavg()[0]
    rows = [row for name in PRESETS for row in measured(name, rounds)]
    columns = ("decoder", "users", "kept (ms)", "not kept (ms)", "times as fast")
    machine = Machine.now("benchmarks.kept_prompts", ("torch", "numpy"), load)
    lengths = f"{PROMPT // 2} to {PROMPT - 1}"
    said = f"Decoders of {VOCABULARY:,} tokens, prompts of {lengths} states, {ITEMS:,} items, a beam of {BEAM}; {rounds} rounds."
    text = "\n".join(["# Kept prompts on a CPU", "", *table(columns, rows), "", said, "", *machine.lines()])
    dated("kept_prompts_cpu", "md").write_text(text)
    print(text)


def measured(name: str, rounds: int) -> list[Sequence[str]]:
    """A row for each number of users, of a decoder of this preset."""
    with tempfile.TemporaryDirectory() as directory:
        sizes = {**PRESETS[name], "prompt_length": PROMPT, "vocabulary": VOCABULARY}
        bundle = make_generative_bundle(Path(directory) / "model", items=ITEMS, sizes=CODES, **sizes)
        return [row(name, bundle, users, rounds) for users in USERS]


def row(name: str, bundle: Bundle, users: int, rounds: int) -> Sequence[str]:
    contenders = [TorchBeamGenerator(cache_bytes=0, prompt_bytes=kept) for kept in (KEPT_BYTES, 0)]
    for contender in contenders:
        contender.load(bundle)
    prompts, took = [prompt(bundle, seed) for seed in range(users)], (list[float](), list[float]())
    for number in range(WARM_UP + rounds):
        asked = [request(one, PROMPT // 2 + number % (PROMPT // 2), f"{user}") for user, one in enumerate(prompts)]
        for place in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            contenders[place].batch_infer(asked)
            took[place].append(1000 * (time.perf_counter() - began))
    kept, plain = (statistics.median(times[WARM_UP:]) for times in took)
    return name, f"{users}", f"{kept:.1f}", f"{plain:.1f}", f"{plain / kept:.2f}"


def prompt(bundle: Bundle, seed: int) -> UserState:
    """As many states and events as a prompt takes."""
    states = np.random.default_rng(seed).standard_normal((PROMPT, bundle.item_vectors.shape[1])).astype(np.float32)
    return UserState(states, history(PROMPT, ITEMS, seed))


def request(whole: UserState, events: int, user: str) -> GenerateRequest:
    """From the first so many events."""
    state = UserState(whole.states[:events], beginning(whole.sequence, events))
    return GenerateRequest(state, TOP, BEAM, blocked=np.empty(0, np.int32), user_id=user)


if __name__ == "__main__":
    main()
