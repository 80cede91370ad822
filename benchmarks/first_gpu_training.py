"""Cases of first_gpu.py: training on the device, against float64 on the CPU, and a step's time beside one of plain PyTorch, in turns."""
# ruff: noqa: SLF001 - it times a step of training

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.devices import DEVICE, INTERPRETED, error_of, wall_ms, worst_error
from benchmarks.first_gpu_bundles import exact_decoder, example
from benchmarks.guarded import Case, Finding, Label, NotHere
from benchmarks.models import MODELS
from cluster.dataset import Interactions
from integrations.decoder.model import SemanticIdDecoder
from integrations.hstu.config import HSTUConfig
from integrations.hstu.kernels.fused import FusedHSTU
from integrations.hstu.model import HSTU
from integrations.hstu.weights import load_model
from pipelines.splits import Example, Windows
from pipelines.train import Trainer, TrainOptions
from pipelines.train_decoder import BETAS, DecoderOptions, DecoderTrainer, WindowColumns

ENCODERS: dict[str, type[HSTU]] = {"torch": HSTU, "triton": FusedHSTU}
GRADIENT_LIMIT, DECODER_LIMITS = 1e-4, {"fp32": 1e-4, "bf16": 2e-2}
TEMPERATURE = TrainOptions().temperature
SMALL = HSTUConfig(items=200, dim=48, attention_dim=24, linear_dim=24, max_length=31, max_history=20, dropout=0.2)


def cases(*, quick: bool) -> Iterator[Case]:
    yield Case(Label("training, resumed after one of two epochs", "24 users", "fp32"), _resumed)
    for name in ENCODERS:
        yield Case(Label(f"training step of encoder {name}, gradients", "2 users", "fp32"), partial(_gradients, DEVICE, name))
    for model, users in (("a", 4),) if quick else (("a", 64), ("b", 64)):
        for name in ENCODERS:
            label = Label(f"training step of encoder {name}, time", f"model {model}, {users} users", "fp32")
            yield Case(label, partial(_step_speed, DEVICE, name, model, users, 1 if quick else 31))
    for precision in ("fp32", "bf16"):
        label = Label("training step of the decoder", "24 users", precision)
        yield Case(label, partial(_decoder_step, DEVICE, precision, 1 if quick else 31))


def _interactions(items: int, users: int = 24, length: int = 12) -> Interactions:
    rng, total = np.random.default_rng(0), users * length
    columns = rng.integers(1, items + 1, total).astype(np.int32), 1_500_000_000 + np.cumsum(rng.integers(1, 5000, total))
    offsets = np.arange(0, total + 1, length, dtype=np.int64)
    return Interactions(
        [f"user {user}" for user in range(users)], offsets, *columns, np.zeros(total, np.int8), np.full(total, np.nan, np.float32)
    )


def _trainer(model: HSTU, *, users: int = 24, length: int = 12, batch_users: int = 8, device: str = "auto") -> Trainer:
    options = TrainOptions(epochs=2, batch_users=batch_users, validate_every=0)
    return Trainer(model, _interactions(model.config.items, users, length), options, device=device)


def _model(name: str, config: HSTUConfig) -> HSTU:
    torch.manual_seed(0)
    return ENCODERS[name](config)


def _resumed() -> Finding:
    """The weights after two epochs, against those of a run that was interrupted after one."""
    whole, first, second = (_trainer(_model("torch", SMALL)) for _ in range(3))
    whole.fit()
    first.run_epoch()
    second.restore(copy.deepcopy(first.state()))
    second.fit()
    error, where = worst_error(second.model.state_dict(), {name: one.cpu().double() for name, one in whole.model.state_dict().items()})
    return Finding(error, 1e-3, note=f"largest in {where}")


def _gradients(device: str, name: str) -> Finding:
    """The loss of a batch and all its gradients."""
    config = SMALL.model_copy(update={"dropout": 0.0})
    error, where = worst_error(_learnt(_model(name, config), device), _learnt(_model("torch", config).double(), "cpu"))
    return Finding(error, GRADIENT_LIMIT, note=f"largest in {where}")


def _learnt(model: HSTU, device: str) -> dict[str, Tensor]:
    trainer = _trainer(model, users=2, device=device)
    loss, _ = trainer._loss(_first_batch(trainer))
    torch.autograd.backward(loss)
    return {"loss": loss.detach(), **{name: one.grad for name, one in model.named_parameters() if one.grad is not None}}


def _first_batch(trainer: Trainer) -> Windows:
    return trainer._batches(np.random.default_rng(0))[0]


def _step_speed(device: str, name: str, model: str, users: int, rounds: int) -> Finding:
    if (device, name) == ("cpu", "triton"):
        raise NotHere(INTERPRETED)
    sizes = MODELS[model]
    config = HSTUConfig.model_validate({**sizes, "max_length": sizes["max_history"] + 11})
    trainer = _trainer(_model(name, config), users=users, length=config.max_history + 2, batch_users=users)
    batch = _first_batch(trainer)
    trainer.model.train()
    ms, eager_ms = wall_ms(partial(trainer._step, batch), _plain_step(device, config, list(batch)), rounds=rounds)
    return Finding(ms=ms, eager_ms=eager_ms, note=f"{sum(len(one.history) for one in batch)} events")


def _plain_step(device: str, config: HSTUConfig, batch: Sequence[Example]) -> Callable[[], float]:
    """HSTU in plain PyTorch, the softmax over all items of all rows at once, and an optimizer that takes one weight after another."""
    model = _model("torch", config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=0, foreach=False)

    def step() -> float:
        optimizer.zero_grad()
        columns = {name: column.to(device) for name, column in model.collate([one.history for one in batch]).tensors().items()}
        targets = torch.from_numpy(np.concatenate([one.targets for one in batch])).to(device)
        states = model(columns["items"], columns["times"], columns["next_times"])[columns["items"] != 0]
        loss = F.cross_entropy(states @ model.item_vectors()[1:].T / TEMPERATURE, targets - 1)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.item()

    return step


def _decoder_step(device: str, precision: str, rounds: int) -> Finding:
    """The loss of a batch against float64, and a step's time beside one in fp32 with an optimizer that takes one weight after another."""
    with example() as bundle:
        options = DecoderOptions.model_validate({"epochs": 1, "validate_every": 0, "precision": precision})
        interactions = _interactions(len(bundle.item_vectors) - 1)
        trainer = DecoderTrainer(exact_decoder(bundle).float(), load_model(bundle), interactions, options)
        batch = trainer._batches(np.random.default_rng(0))[0]
        with torch.no_grad():
            loss, exact = trainer._loss(batch)[0].float(), exact_decoder(bundle)
            error = error_of(loss, exact.loss(exact.batch([_doubled(window) for window in batch])))
        trainer.decoder.train()
        plain = _plain_decoder_step(exact.float().to(device).train(), batch)
        ms, eager_ms = wall_ms(partial(trainer._step, batch), plain, rounds=rounds)
    return Finding(error, DECODER_LIMITS[precision], ms=ms, eager_ms=eager_ms)


def _plain_decoder_step(decoder: SemanticIdDecoder, batch: Sequence[WindowColumns]) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(decoder.parameters(), betas=BETAS, foreach=False)

    def step() -> float:
        optimizer.zero_grad()
        loss = decoder.loss(decoder.batch(batch))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0, foreach=False)
        optimizer.step()
        return loss.item()

    return step


def _doubled(window: WindowColumns) -> WindowColumns:
    return {name: column.double() if column.is_floating_point() else column for name, column in window.items()}
