"""Cases of first_gpu.py: the encoders, torch_beam and training of examples/ml-100k's model on the device, against float64 on the CPU."""
# ruff: noqa: SLF001 - it times a step of training

import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.devices import DEVICE, INTERPRETED, error_of, wall_ms
from benchmarks.guarded import Case, Finding, Label, NotHere
from benchmarks.models import MODELS
from benchmarks.naive_hstu import NaiveHSTU
from cluster.bundle import (
    CATALOGUE,
    DECODER,
    FIRST_SEEN,
    GENERATIVE,
    ITEM_VECTORS,
    POPULARITY,
    SOFT_PROMPT,
    WEIGHTS,
    Bundle,
    BundleStore,
    DecoderRecord,
    ModelRecord,
)
from cluster.dataset import Interactions
from cluster.values import EncodeRequest, GenerateRequest, UserSequence, UserState
from integrations.decoder.files import decoder_config
from integrations.decoder.model import SemanticIdDecoder
from integrations.hstu.config import HSTUConfig
from integrations.hstu.encoder import TorchEncoder
from integrations.hstu.kernels.encoder import TritonEncoder
from integrations.hstu.latest_states import latest_states
from integrations.hstu.model import HSTU
from integrations.hstu.user_behavior_schema import collate
from integrations.hstu.weights import build_model, load_model, load_weights, save_weights
from integrations.torch_beam.generator import TorchBeamGenerator
from pipelines.train import Trainer, TrainOptions
from pipelines.train_decoder import DecoderOptions, DecoderTrainer
from tests.kernel_examples import InterpretedEncoder, times_of

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "ml-100k"
ENCODERS: dict[str, Callable[..., TorchEncoder]] = {"torch": TorchEncoder, "triton": TritonEncoder}
STATE_LIMIT, LOG_PROB_LIMIT = 1e-4, 1e-4
TOP = 10
USERS = (1, 8, 32)


def cases(*, quick: bool) -> Iterator[Case]:
    device = DEVICE
    lengths = (1, 12, 40) if quick else (1, 31, 64, 65, 200)
    sizes = f"ml-100k, {', '.join(map(str, lengths))} events"
    for name in ENCODERS:
        yield Case(Label(f"encoder {name}", sizes, "fp32"), partial(_encoded, device, name, lengths))
        yield Case(
            Label(f"encoder {name}, what it kept continued", f"ml-100k, {lengths[-1]} events", "fp32"),
            partial(_kept, device, name, lengths[-1]),
        )
    yield Case(Label("torch_beam", sizes, "fp32"), partial(_generated, lengths))
    yield Case(Label("training, resumed after one of two epochs", "24 users", "fp32"), _resumed)
    for precision in ("fp32", "bf16"):
        yield Case(Label("training step of the decoder", "24 users", precision), partial(_decoder_step, precision))
    for model in ("a",) if quick else ("a", "b"):
        for users in USERS[:1] if quick else USERS:
            for name in ENCODERS:
                label = Label(f"encoder {name}, time", f"model {model}, {users} users", "fp32")
                yield Case(label, partial(_encoder_speed, device, name, model, users, 3 if quick else 31))
    for users in USERS[:1] if quick else USERS:
        yield Case(Label("torch_beam, time", f"ml-100k, {users} users", "fp32"), partial(_beam_speed, users, 3 if quick else 31))


@contextmanager
def _example() -> Iterator[Bundle]:
    """examples/ml-100k without its data set: titles and popularity are not asked for."""
    described = json.loads((EXAMPLE / "model.json").read_text())
    with tempfile.TemporaryDirectory() as folder, _published(Path(folder), ModelRecord(**described["model"]), EXAMPLE) as bundle:
        yield bundle


@contextmanager
def _published(folder: Path, record: ModelRecord, source: Path | None = None) -> Iterator[Bundle]:
    """A bundle of the weights in `source` with their decoder, or of random weights."""
    store = BundleStore(folder / "model")
    torch.manual_seed(0)
    with store.publish(record) as draft:
        model = build_model(record)
        if source:
            load_weights(model, source / WEIGHTS)
            (draft.path / DECODER).mkdir()
            for file in GENERATIVE:
                shutil.copyfile(source / file, draft.path / file)
            draft.decoder = DecoderRecord(**json.loads((source / "model.json").read_text())["decoder"])
        save_weights(model.state_dict(), draft.path / WEIGHTS)
        (draft.path / CATALOGUE).write_bytes(b"")
        for file in (POPULARITY, FIRST_SEEN):
            np.save(draft.path / file, np.zeros(model.config.items + 1, np.int64))
        np.save(draft.path / ITEM_VECTORS, model.item_vectors().detach().numpy())
    yield store.open()


def _history(length: int, items: int, seed: int) -> UserSequence:
    """Events with times that fall into the same buckets on every device."""
    rng = np.random.default_rng([seed, length])
    times, _ = times_of(rng, length)
    return UserSequence(
        items=rng.integers(1, items + 1, length).astype(np.int32),
        timestamps=1_700_000_000 + times.astype(np.int64),
        actions=np.zeros(length, np.int8),
        values=np.full(length, np.nan, np.float32),
        request_time=1_700_000_000,
    )


def _loaded(device: str, name: str, bundle: Bundle, **options: Any) -> TorchEncoder:
    encoder = InterpretedEncoder(**options) if (device, name) == ("cpu", "triton") else ENCODERS[name](**options)
    encoder.load(bundle)
    return encoder


def _exact_states(bundle: Bundle, histories: Sequence[UserSequence], count: int = 1) -> torch.Tensor:
    """The latest states (B, C, D) in float64 on the CPU."""
    model = load_model(bundle).double()
    columns = collate(histories, model.config.max_history).tensors()
    with torch.inference_mode():
        return latest_states(model, columns["items"], columns["times"], columns["next_times"], columns["lengths"], count)


def _compared(bundle: Bundle, answers: Sequence[Any], histories: Sequence[UserSequence]) -> Finding:
    exact = _exact_states(bundle, histories)[:, 0]
    vectors = torch.from_numpy(np.array(bundle.item_vectors[1:])).double()
    nearest = torch.topk(exact @ vectors.T, TOP).indices + 1
    same = sum(set(answer.items.tolist()) == set(row) for answer, row in zip(answers, nearest.tolist(), strict=True))
    states = torch.from_numpy(np.stack([answer.state for answer in answers]))
    return Finding(error_of(states, exact), STATE_LIMIT, note=f"{same} of {len(answers)} users have the same {TOP} items")


def _encoded(device: str, name: str, lengths: Sequence[int]) -> Finding:
    with _example() as bundle:
        histories = [_history(length, len(bundle.item_vectors) - 1, seed) for seed, length in enumerate(lengths)]
        encoder = _loaded(device, name, bundle, state_bytes=0)
        return _compared(bundle, encoder.batch_infer([EncodeRequest(history, TOP) for history in histories]), histories)


def _kept(device: str, name: str, length: int) -> Finding:
    with _example() as bundle:
        whole = _history(length, len(bundle.item_vectors) - 1, 0)
        encoder = _loaded(device, name, bundle, keep_from=1)
        for known in (length // 2, length):
            answer = encoder.infer(EncodeRequest(_beginning(whole, known), TOP, user="ann"))
        kept, found = encoder.kept(), _compared(bundle, [answer], [whole])
    if kept["hit_rows"] != length // 2 - 1 or kept["failures"]:
        return replace(found, error=float("nan"), note=f"not continued: {kept}")
    return found


def _beginning(sequence: UserSequence, length: int) -> UserSequence:
    """The first events of a history, asked about when the next one happened."""
    columns = {name: getattr(sequence, name)[:length] for name in ("items", "timestamps", "actions", "values")}
    asked = sequence.request_time if length == len(sequence) else int(sequence.timestamps[length])
    return replace(sequence, **columns, request_time=asked)


def _prompts(bundle: Bundle, lengths: Sequence[int]) -> list[UserState]:
    """As the encoder gives them: the states after the latest events, and those events."""
    prompts = []
    for seed, length in enumerate(lengths):
        history, count = _history(length, len(bundle.item_vectors) - 1, seed), min(length, bundle.prompt_length)
        columns = {name: getattr(history, name)[-count:] for name in ("items", "timestamps", "actions", "values")}
        prompts.append(UserState(_exact_states(bundle, [history], count)[0].float().numpy(), replace(history, **columns)))
    return prompts


def _asked(prompts: Sequence[UserState]) -> list[GenerateRequest]:
    return [GenerateRequest(prompt, TOP, 2 * TOP, blocked=np.empty(0, np.int32)) for prompt in prompts]


def _generated(lengths: Sequence[int]) -> Finding:
    """The log-probability of every item that was found, against the decoder's own in float64."""
    with _example() as bundle:
        generator = TorchBeamGenerator()
        generator.load(bundle)
        prompts = _prompts(bundle, lengths)
        answers = generator.batch_infer(_asked(prompts))
        decoder = _exact_decoder(bundle)
        errors = [
            abs(float(log_prob) + _loss_of(decoder, prompt, int(item)))
            for prompt, answer in zip(prompts, answers, strict=True)
            for item, log_prob in zip(answer.items, answer.log_probs, strict=True)
        ]
    return Finding(max(errors), LOG_PROB_LIMIT, note=f"absolute, in the log-probabilities of {len(errors)} items")


def _exact_decoder(bundle: Bundle) -> SemanticIdDecoder:
    decoder = SemanticIdDecoder(decoder_config(bundle), bundle.semantic_ids, bundle.item_vectors)
    decoder.lm.load_state_dict(load_file(bundle.path / DECODER / "model.safetensors"))
    decoder.prompt.load_state_dict(load_file(bundle.path / SOFT_PROMPT))
    return decoder.double().eval()


def _loss_of(decoder: SemanticIdDecoder, prompt: UserState, item: int) -> float:
    targets = torch.zeros(len(prompt), dtype=torch.int64)
    targets[-1] = item
    states = torch.from_numpy(prompt.states).double()
    with torch.inference_mode():
        return float(decoder.loss(decoder.batch([decoder.columns(prompt.sequence, states, targets)])))


def _interactions(items: int, users: int = 24, length: int = 12) -> Interactions:
    rng, total = np.random.default_rng(0), users * length
    columns = rng.integers(1, items + 1, total).astype(np.int32), 1_500_000_000 + np.cumsum(rng.integers(1, 5000, total))
    offsets = np.arange(0, total + 1, length, dtype=np.int64)
    return Interactions(
        [f"user {user}" for user in range(users)], offsets, *columns, np.zeros(total, np.int8), np.full(total, np.nan, np.float32)
    )


def _trainer() -> Trainer:
    torch.manual_seed(0)
    config = HSTUConfig(items=200, dim=48, attention_dim=24, linear_dim=24, max_length=31, max_history=20, dropout=0.2)
    return Trainer(HSTU(config), _interactions(config.items), TrainOptions(epochs=2, batch_users=8, validate_every=0))


def _resumed() -> Finding:
    """The weights after two epochs, against those of a run that was interrupted after one."""
    whole, first, second = _trainer(), _trainer(), _trainer()
    whole.fit()
    first.run_epoch()
    second.restore(copy.deepcopy(first.state()))
    second.fit()
    errors = {
        name: error_of(tensor, first_of.cpu().double())
        for (name, tensor), first_of in zip(second.model.state_dict().items(), whole.model.state_dict().values(), strict=True)
    }
    batch = second._batches(np.random.default_rng(0))[0]
    second.model.train()
    return Finding(max(errors.values()), 1e-3, ms=wall_ms(lambda: second._step(batch), 5), note="the time is a step's, of 8 users")


def _decoder_step(precision: str) -> Finding:
    """The loss of a batch against float64, and a step's time."""
    with _example() as bundle:
        decoder = _exact_decoder(bundle)
        options = DecoderOptions.model_validate({"epochs": 1, "validate_every": 0, "precision": precision})
        trainer = DecoderTrainer(decoder.float(), load_model(bundle), _interactions(len(bundle.item_vectors) - 1), options)
        batch = trainer._batches(np.random.default_rng(0))[0]
        with torch.no_grad():
            loss = trainer._loss(batch)[0].float()
            exact = _exact_decoder(bundle).loss(_exact_decoder(bundle).batch([_doubled(window) for window in batch]))
        decoder.train()
        ms = wall_ms(lambda: trainer._step(batch), 3)
    return Finding(error_of(loss, exact), {"fp32": 1e-4, "bf16": 2e-2}[precision], ms=ms)


def _doubled(window: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: column.double() if column.is_floating_point() else column for name, column in window.items()}


def _encoder_speed(device: str, name: str, model: str, users: int, rounds: int) -> Finding:
    """From requests to the nearest items: beside eager HSTU and topk there, and of a user with kept states."""
    if (device, name) == ("cpu", "triton"):
        raise NotHere(INTERPRETED)
    sizes = MODELS[model]
    record = ModelRecord(family="hstu", config={**sizes, "max_length": sizes["max_history"] + 11})
    with tempfile.TemporaryDirectory() as folder, _published(Path(folder), record) as bundle:
        length = sizes["max_history"]
        histories = [_history(length, sizes["items"], seed) for seed in range(users)]
        cold = [EncodeRequest(history, TOP) for history in histories]
        off, keeping = (_loaded(device, name, bundle, state_bytes=size, keep_from=1) for size in (0, 1 << 30))
        known = [EncodeRequest(history, TOP, user=f"user {number}") for number, history in enumerate(histories)]
        keeping.batch_infer([replace(one, sequence=_beginning(one.sequence, length - 1)) for one in known])
        hit = wall_ms(lambda: keeping.batch_infer(known), rounds)
        return Finding(
            ms=wall_ms(lambda: off.batch_infer(cold), rounds),
            eager_ms=wall_ms(_eager(device, bundle, histories), rounds),
            note=f"users whose events but one are kept: {hit:.3f} ms",
        )


def _eager(device: str, bundle: Bundle, histories: Sequence[UserSequence]) -> Callable[[], object]:
    model = load_model(bundle)
    assert isinstance(model, HSTU)
    naive, vectors = NaiveHSTU(model).eval().to(device), torch.from_numpy(np.array(bundle.item_vectors[1:])).to(device)

    @torch.inference_mode()
    def encode() -> object:
        columns = collate(histories, model.config.max_history).tensors()
        states = naive(*(columns[name].to(device) for name in ("items", "times", "next_times", "lengths")))
        return [found.cpu() for found in torch.topk(states @ vectors.T, TOP)]

    return encode


def _beam_speed(users: int, rounds: int) -> Finding:
    with _example() as bundle:
        generator = TorchBeamGenerator(cache_bytes=0, prompt_bytes=0)
        generator.load(bundle)
        requests = _asked(_prompts(bundle, [100 + number for number in range(users)]))
        return Finding(ms=wall_ms(lambda: generator.batch_infer(requests), rounds))
