"""The memory of each stage's engines. A backend that genrec does not bring holds an unknown amount, which counts as nothing.

V items, D width, 4 bytes a number. All of a stage's engines that can run are loaded, so that a fallback is there at once; the states kept
of users are counted for the first engine, which serves.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from cluster import registry
from cluster.config import EngineSettings, Settings
from cluster.nearest import AUTO, BF16_FROM, CUDA_FROM
from cluster.options import whole
from deployments.sizing.model import Sizes
from deployments.sizing.parts import MIB, Part, Place
from integrations.hstu.append_inputs import most_users_at_once
from integrations.hstu.config import HSTUConfig, RankerConfig, SequenceConfig
from integrations.hstu.limits import MOST_PAIRS, MOST_PAIRS_ON_GPU
from integrations.hstu.model_parameter_calculator import append_bytes, model_size
from integrations.hstu.ranking_engine import MICRO_BATCH
from integrations.hstu.state.pool import PAGE_ROWS, Plane
from integrations.hstu.state_options import DEFAULT_BYTES, pays_from, state_planes
from integrations.openvino.shapes import shapes_met
from integrations.vllm import library

GPU_ONLY = ("tensorrt", "triton")
BY_TORCH = {"torch", "torch_compiled", "triton", "tensorrt", "torch_beam", "vllm"}
GRAPHS = {
    ("encoder", "onnxruntime"): "onnx/retrieve",
    ("encoder", "openvino"): "onnx/encode",
    ("encoder", "tensorrt"): "tensorrt/encode",
    ("ranker", "onnxruntime"): "onnx/rank",
    ("ranker", "openvino"): "onnx/rank",
    ("ranker", "tensorrt"): "tensorrt/rank",
}
LIBRARIES = {
    "onnxruntime": (8 * MIB, 24 * MIB),
    "openvino": (21 * MIB, 48 * MIB),
    "torch": (130 * MIB, 86 * MIB),
    "torch_beam": (36 * MIB, 88 * MIB),
    "vllm": (215 * MIB, 104 * MIB),
}
"""What importing a library takes: (own memory, mapped files), on a CPU, checked by benchmarks/size.py. torch counts for all engines that
compute by it.
"""
APPENDS = {"onnxruntime": "onnx/append", "openvino": "onnx/append", "tensorrt": "tensorrt/append"}
"""Graphs without which an encoder of this name keeps no states."""
WHOLE_SHAPE, APPENDED_SHAPE, ANY_SHAPE = 6 * MIB, 6 * MIB // 5, 500 * MIB
"""The bytes of OpenVINO's programs, whatever the model, as its layers share them: for each shape of the graph `encode`, for each of
`append`, and in all for a ranker's shapes, kept by OpenVINO and oneDNN.
"""
VLLM_ENGINE, VLLM_WORK = (470 * MIB, 258 * MIB), 320 * MIB
CUDA_CONTEXT = 512 * MIB
"""The memory of a GPU that each process takes by using it; a usual size, not measured here."""
PROMPT_PAGE_ROWS = 16
OWNER_BYTES, ROW_BYTES = 600, 24
"""The bytes noted of a kept user, and of each of the user's rows, beside the rows themselves."""
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "fp32": 4, "fp16": 2}


@dataclass(frozen=True, slots=True)
class Use:
    """`users` that come back to one replica while their states are kept, each with `history` events; None: as many as there is room for."""

    users: int | None = None
    history: int | None = None

    def within(self, window: int) -> "Use":
        """The use as a model sees it that takes at most `window` events of a history."""
        return Use(self.users, min(window, self.history or window))


def can_run(stage: str, name: str, sizes: Sizes, place: Place) -> bool:
    """Whether this backend is loaded for the model: the model has the stage and the compiled artifacts, and the device fits."""
    if (stage == "generator" and not sizes.decoder) or (stage == "ranker" and not sizes.ranker):
        return False
    if (name in GPU_ONLY and place != "gpu") or (name == "vllm" and library.obstacle()):
        return False
    return (graph := GRAPHS.get((stage, name))) is None or graph in sizes.graphs


def loaded(stage: str, settings: Settings, sizes: Sizes, place: Place) -> list[str]:
    """The backends of the stage's order that are loaded, first choice first; "" for one that genrec does not bring, whatever its name: its
    options are its own, too.
    """
    engines = settings.engines(stage)
    table, ours = registry.backends(stage, engines.backends), registry.BACKENDS[stage]
    enabled = [name if table[name] == ours.get(name) else "" for name in engines.in_order() if name not in engines.disabled]
    return [name for name in enabled if can_run(stage, name, sizes, place)]


def stage_parts(stage: str, settings: Settings, sizes: Sizes, use: Use, place: Place) -> Iterator[Part]:
    """The parts of all engines of a stage in one replica, libraries left out."""
    names = loaded(stage, settings, sizes, place)
    parts = {"encoder": _encoder, "generator": _generator, "ranker": _ranker}[stage]
    for position, name in enumerate(names):
        yield from parts(name, settings, sizes, use if position == 0 else Use(users=0), place)
    if stage == "generator" and names:
        yield from _semantic_ids(sizes)
    if (stage == "generator" and names) or (stage == "encoder" and {"onnxruntime", "openvino", "tensorrt"} & set(names)):
        yield Part(f"{stage}: item vectors", sizes.vector_bytes)
    if stage == "encoder" and names:
        yield Part("encoder: states taken over", settings.encoder.handover.max_bytes, "passing", key="encoder.handover.max_bytes")
    if names and names[0] != "vllm":  # which has no batches of ours
        yield _batch(stage, names[0], settings.engines(stage), sizes, _place(names[0], place))


def libraries(stage: str, settings: Settings, sizes: Sizes, place: Place) -> set[str]:
    """The libraries that a stage's engines import. An encoder imports PyTorch in any case, to find out whether triton could serve."""
    names = set(loaded(stage, settings, sizes, place))
    needs_torch = names & BY_TORCH or (stage == "encoder" and find_spec("triton"))
    return names | ({"torch"} if needs_torch else set())


def library_parts(names: set[str], place: Place) -> Iterator[Part]:
    """The parts of memory that these libraries take in their process."""
    for name in sorted(names & set(LIBRARIES)):
        own, mapped = LIBRARIES[name]
        yield Part(f"library {name}", own)
        yield Part(f"library {name}", mapped, "mapped")
    if place == "gpu" and names - {"openvino"}:
        yield Part("CUDA context", CUDA_CONTEXT, place="gpu")


def engine_process(settings: Settings, sizes: Sizes, place: Place) -> tuple[Part, ...]:
    """The parts of vLLM's own process beside a replica of the generator; nothing where there is none."""
    if sizes.decoder is None or "vllm" not in loaded("generator", settings, sizes, place):
        return ()
    options = settings.generator.options.get("vllm", {})
    dtype = options.get("dtype", "auto")
    width = WIDTHS.get(dtype, 2 if place == "gpu" else 4)
    (own, mapped), key = VLLM_ENGINE, "generator.options.vllm.kv_cache_bytes"
    return (
        Part("Python and vLLM", own),
        Part("Python and vLLM", mapped, "mapped"),
        Part("vllm: weights", sizes.decoder.parameters * width, place=place),
        Part("vllm: KV cache", whole(key, options.get("kv_cache_bytes", 256 * MIB)), place=place, key=key),
        Part("vllm: requests", VLLM_WORK, "passing", place),
        *([Part("CUDA context", CUDA_CONTEXT, place="gpu")] if place == "gpu" else ()),
    )


def _encoder(name: str, settings: Settings, sizes: Sizes, use: Use, place: Place) -> Iterator[Part]:
    options, place = settings.encoder.options.get(name, {}), _place(name, place)
    weights = model_size(sizes.encoder).weight_bytes
    on_device = _keeps_on_gpu(name, place)
    state_bytes = _state_bytes(name, options, sizes.encoder, on_device=on_device) if _appends(name, sizes) else 0
    match name:
        case "onnxruntime":
            search = _narrowed(sizes.encoder) if options.get("precision") == "int8" else weights
            yield Part(f"encoder {name}: weights", search + sizes.vector_bytes, place=place)
        case "openvino":
            yield Part(f"encoder {name}: weights", weights, place=place)
            yield from _programs(f"encoder {name}", settings, sizes, use, keeps=bool(state_bytes))
        case "tensorrt":
            weights = weights * _engine_width(options) // 4
            yield Part(f"encoder {name}: weights", weights, place=place)
        case "torch" | "torch_compiled" | "triton":
            yield Part(f"encoder {name}: weights", weights, place=place)
            yield Part(f"encoder {name}: item vectors", sizes.vector_bytes)
        case _:
            return
    if state_bytes and name in APPENDS:
        yield Part(f"encoder {name}: weights to append", weights, place=place)
    torch_or_tensorrt = name not in {"onnxruntime", "openvino"}
    index, searched = options.get("index", AUTO if torch_or_tensorrt else "exact"), place if torch_or_tensorrt else "host"
    yield from _index(f"encoder {name}", index, sizes, settings.encoder.batching.max_requests, searched)
    if isinstance(sizes.encoder, HSTUConfig) and state_bytes:
        planes = state_planes(sizes.encoder, _dtype(options), with_states=bool(sizes.decoder))
        yield from _kept(f"encoder {name}", planes, state_bytes, options, use.within(sizes.encoder.max_history), on_device=on_device)
        if on_device and name != "torch_compiled":  # which takes few users at a time
            user = sizes.encoder.max_history * model_size(sizes.encoder).kv_bytes_per_event
            users = most_users_at_once(range(1, settings.encoder.batching.max_requests + 1), user)
            yield Part(f"encoder {name}: kept rows of a batch", users * user, "start" if name == "triton" else "passing", "gpu")


def _ranker(name: str, settings: Settings, sizes: Sizes, use: Use, place: Place) -> Iterator[Part]:
    if (config := sizes.ranker) is None or name not in {"onnxruntime", "openvino", "tensorrt", "torch"}:
        return
    options, weights, place = settings.ranker.options.get(name, {}), model_size(config).weight_bytes, _place(name, place)
    weights = weights * _engine_width(options) // 4 if name == "tensorrt" else weights
    yield Part(f"ranker {name}: weights", weights, place=place)
    if name != "torch":
        yield Part(f"ranker {name}: weights to append", weights, place=place)
    if name == "openvino" and use.users != 0:
        yield Part(f"ranker {name}: programs for shapes", ANY_SHAPE, "filled")
    if state_bytes := _state_bytes(name, options, config):
        planes = state_planes(config, _dtype(options), with_states=False)
        yield from _kept(f"ranker {name}", planes, state_bytes, options, use.within(config.max_history))


def _generator(name: str, settings: Settings, sizes: Sizes, use: Use, place: Place) -> Iterator[Part]:
    if (config := sizes.decoder) is None or name not in {"vllm", "torch_beam"}:
        return
    options = settings.generator.options.get(name, {})
    yield Part(f"generator {name}: soft prompt", sizes.vector_bytes)
    if name == "vllm":
        return
    width = WIDTHS.get(options.get("dtype", "float32"), 4)
    yield Part(f"generator {name}: weights", config.parameters * width, place=place)
    key = f"generator.options.{name}.cache_bytes"
    yield Part(f"generator {name}: kept logits", whole(key, options.get("cache_bytes", 8 * MIB)), "filled", place, key)
    dtype = np.float32 if width == 4 else np.int16
    planes = {str(layer): Plane((2, config.heads, config.head_dim), 0, dtype) for layer in range(config.layers)}
    key = f"generator.options.{name}.prompt_bytes"
    budget = whole(key, options.get("prompt_bytes", 64 * MIB))
    rows = min(config.prompt_length, use.history or config.prompt_length) - 1
    size, users = kept_bytes(planes, budget, PROMPT_PAGE_ROWS, rows, use.users)
    yield Part(f"generator {name}: kept prompts", size, "filled", key=key, users=users)


def _programs(name: str, settings: Settings, sizes: Sizes, use: Use, *, keeps: bool) -> Iterator[Part]:
    """The programs that OpenVINO makes for each shape it meets, and keeps; where all histories are equally long, few shapes come."""
    if use.users == 0:
        return
    longest = sizes.encoder.max_history
    lengths = [min(longest, use.history)] if use.history else range(1, longest + 1)
    whole, appended = shapes_met(settings.encoder.batching.max_requests, lengths, sizes.encoder)
    yield Part(f"{name}: programs for shapes", len(whole) * WHOLE_SHAPE + keeps * len(appended) * APPENDED_SHAPE, "filled")


def _kept(
    name: str, planes: dict[str, Plane], budget: int, options: dict[str, Any], use: Use, *, on_device: bool = False
) -> Iterator[Part]:
    """The kept states of users. The row of a history's last event is not final, and the encoder never keeps it."""
    stage, _, engine = name.partition(" ")
    history = use.history or 0
    rows = history - (stage == "encoder") if history >= _keep_from(engine, options, on_device=on_device) else 0
    kept = {plane: replace(of, dtype=np.float32) for plane, of in planes.items()} if on_device else planes  # on a GPU always fp32
    key, (size, users) = f"{stage}.options.{engine}.state_bytes", kept_bytes(kept, budget, PAGE_ROWS, rows, use.users)
    yield Part(f"{name}: kept states", size, "filled", "gpu" if on_device else "host", key, users)
    if on_device:  # over pinned host memory, which is taken at once
        yield Part(f"{name}: kept states", pinned_bytes(planes, budget), "start", "host", key)


def kept_bytes(planes: dict[str, Plane], budget: int, page_rows: int, rows: int, users: int | None) -> tuple[int, int]:
    """(bytes, users): of so many users' rows in a PagePool of that budget, with what is noted beside them; `users` None: as many as fit."""
    page = page_rows * sum(plane.row_bytes for plane in planes.values())
    each = -(-rows // page_rows)
    pages = budget // page if page else 0
    if not each or not pages:
        return 0, 0
    fit = pages // each if users is None else min(users, pages // each)
    return (pages if users is None else min(pages, users * each)) * page + fit * (OWNER_BYTES + rows * ROW_BYTES), fit


def pinned_bytes(planes: dict[str, Plane], budget: int) -> int:
    """The pinned host memory of a PagePool of that budget: PyTorch rounds each plane's up to a power of two."""
    pages = budget // (PAGE_ROWS * sum(plane.row_bytes for plane in planes.values()))
    return sum(1 << (pages * PAGE_ROWS * plane.row_bytes - 1).bit_length() for plane in planes.values()) if pages else 0


def _semantic_ids(sizes: Sizes) -> Iterator[Part]:
    """Codes, the same as tokens, and the trie: an item's nodes, each with a token, a parent, where its children begin, and a count."""
    if sizes.decoder is not None:
        yield Part("generator: semantic IDs", 4 * (sizes.items + 1) * (2 * sizes.decoder.levels + 8))


def _batch(stage: str, name: str, settings: EngineSettings, sizes: Sizes, place: Place) -> Part:
    """The largest batch while it is computed: of the longest histories of users of which nothing is kept."""
    limits = settings.batching
    match stage:
        case "encoder":
            users = max(1, min(limits.max_requests, limits.max_tokens // sizes.encoder.max_history))
            options, on_device = settings.options.get(name, {}), _keeps_on_gpu(name, place)
            keeps = _appends(name, sizes) and _state_bytes(name, options, sizes.encoder, on_device=on_device)
            appended = _appended_bytes(name, sizes.encoder, users, place) if keeps else 0
            size = max(model_size(sizes.encoder, batch=users).activation_bytes, appended) + 8 * limits.max_requests * sizes.items
        case "ranker":
            assert sizes.ranker is not None
            in_blocks = model_size(sizes.ranker, length=sizes.ranker.max_history + 1).activation_bytes
            appended = _appended_bytes(name, sizes.ranker, 1, place)  # which a graph's library keeps while candidates are ranked
            size = max(in_blocks, appended + _candidates_bytes(name, settings.options.get(name, {}), sizes.ranker))
        case _:
            assert sizes.decoder is not None
            size = 4 * limits.max_tokens * sizes.decoder.hidden * (2 * sizes.decoder.layers + 8)
    return Part(f"{stage}: a batch", size, "passing", place, f"{stage}.batching")


def _appends(name: str, sizes: Sizes) -> bool:
    """Whether an encoder of this name can append new events to kept states."""
    return isinstance(sizes.encoder, HSTUConfig) and APPENDS.get(name) in {None, *sizes.graphs}


def _appended_bytes(name: str, config: SequenceConfig, users: int, place: Place) -> int:
    """The bytes in use while an engine appends whole histories by a graph; 0 of those that do it in blocks of their own."""
    if name not in {"onnxruntime", "openvino"} or not isinstance(config, HSTUConfig):
        return 0
    return append_bytes(config, users, MOST_PAIRS_ON_GPU if place == "gpu" else MOST_PAIRS)


def _candidates_bytes(name: str, options: dict[str, Any], config: RankerConfig) -> int:
    """The bytes in use while candidates, as many as are computed at a time, look at the longest history: of each pair and head two numbers,
    in a graph four.
    """
    candidates = whole(f"ranker.options.{name}.micro_batch", options.get("micro_batch", MICRO_BATCH))
    return 4 * (4 if name in {"onnxruntime", "openvino"} else 2) * candidates * config.max_history * config.heads


def _narrowed(config: SequenceConfig) -> int:
    """The bytes of weights of which the layers' are int8."""
    size = model_size(config)
    return 4 * size.embedding_parameters + size.parameters - size.embedding_parameters


def _engine_width(options: dict[str, Any]) -> int:
    """Bytes of a number in a TensorRT engine."""
    return WIDTHS.get(next(iter(options.get("precisions", ("fp32",)))), 4)


def _state_bytes(name: str, options: dict[str, Any], config: SequenceConfig, *, on_device: bool = False) -> int:
    """The bytes that an engine may take for users' states: none where no history of the model is long enough."""
    state_bytes = whole(f"options.{name}.state_bytes", options.get("state_bytes", DEFAULT_BYTES))
    return state_bytes if config.max_history >= _keep_from(name, options, on_device=on_device) else 0


def _keep_from(name: str, options: dict[str, Any], *, on_device: bool) -> int:
    return whole(f"options.{name}.keep_from", options.get("keep_from", pays_from(on_gpu=on_device)))


def _keeps_on_gpu(name: str, place: Place) -> bool:
    """Whether an encoder on this device, which is `_place`'s, has its users' rows there."""
    return place == "gpu" and name != "onnxruntime"


def _place(name: str, place: Place) -> Place:
    """The device that the backend computes on: OpenVINO on CPUs only, others on the given one."""
    return "host" if name == "openvino" else place


def _index(what: str, name: str, sizes: Sizes, users: int, place: Place) -> Iterator[Part]:
    if name == AUTO:
        fastest, least = ("cuda", CUDA_FROM) if place == "gpu" else ("bf16", BF16_FROM)
        name = fastest if sizes.items >= least else "exact"
    if name == "cuda":
        yield Part(f"{what}: vectors of nearest items", sizes.vector_bytes, place="gpu")
        yield Part(f"{what}: scores of all items", 4 * sizes.items * users, when="passing", place="gpu")
    elif name != "exact":
        yield Part(f"{what}: index of nearest items", sizes.vector_bytes // 2)


def _dtype(options: dict[str, Any]) -> "np.dtype[Any]":
    return np.dtype("float16" if options.get("state_dtype") == "fp16" else "float32")
