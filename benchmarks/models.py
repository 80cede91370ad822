"""Models of the sizes that benchmarks measure, with random weights, compiled to ONNX in fp32."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cluster.bundle import Bundle
from cluster.bundle_store import BundleStore
from cluster.compilation import CompileOptions
from cluster.errors import CompileError
from pipelines.compile import compile_bundle
from tests.bundles import make_bundle

MODELS: Mapping[str, Mapping[str, int]] = {
    "a": {"layers": 2, "dim": 50, "heads": 1, "attention_dim": 50, "linear_dim": 50, "max_history": 200, "items": 3700},
    "b": {"layers": 4, "dim": 256, "heads": 4, "attention_dim": 64, "linear_dim": 64, "max_history": 512, "items": 20_000},
    "c1": {"layers": 8, "dim": 512, "heads": 8, "attention_dim": 64, "linear_dim": 64, "max_history": 1024, "items": 20_000},
    "c": {"layers": 8, "dim": 512, "heads": 8, "attention_dim": 64, "linear_dim": 64, "max_history": 2048, "items": 3700},
}


def compiled(root: Path, name: str, make: Callable[..., object] = make_bundle) -> Bundle:
    """The model of that name under `root`, made by `make` where there is none yet. Raises SystemExit where a graph cannot be compiled."""
    if root.exists():
        return BundleStore(root).open()
    sizes = MODELS[name]
    make(root, **{**sizes, "max_length": sizes["max_history"] + 11})
    try:
        return with_graphs(BundleStore(root))
    except CompileError as error:
        raise SystemExit(f"the model cannot be compiled: {error}") from None


def with_graphs(store: BundleStore) -> Bundle:
    """The next version of the model that is there, with its graphs in fp32. Raises CompileError where one cannot be compiled."""
    bundle = compile_bundle(store, CompileOptions(targets=(), precisions=("fp32",)), only=["onnx"])
    for failed in bundle.manifest.failed_steps:
        raise CompileError(f"{failed.step}: {failed.reason}")
    return bundle


def described(names: Iterable[str]) -> list[str]:
    """Their sizes, a line of Markdown each, and an empty one."""
    return [*(f"- {name}: {', '.join(f'{key} {value}' for key, value in MODELS[name].items())}" for name in names), ""]
