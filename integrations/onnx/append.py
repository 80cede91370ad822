"""The append graph as the function behind kept states, for every engine that takes the graph."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cluster.bundle import Bundle
from cluster.compilation import compile_command, unavailable
from integrations.hstu.append_inputs import Arrays
from integrations.hstu.stateful import RunAppend
from integrations.onnx.files import graph_file
from integrations.onnx.layers import graph_inputs

GRAPH = "append"
OUTPUTS = ("states", "kt", "v")


def append_run(bundle: Bundle, call: Callable[[Arrays], Mapping[str, Any]], inputs: Iterable[str], outputs: Iterable[str]) -> RunAppend:
    """The append as a function. `call` runs the graph; `inputs` and `outputs` are the names of its nodes. Raises BackendUnavailable where
    the graph is too old.
    """
    taken = tuple(inputs)
    if missing := ({"past_kt_0", "past_v_0"} - {*taken}) | ({*OUTPUTS} - {*outputs}):
        older = f"{bundle.version}'s graph {graph_file(GRAPH, 'fp32')} lacks {', '.join(sorted(missing))}: an older genrec compiled it"
        raise unavailable(bundle, f"{older}; run: {compile_command(bundle)}")

    def run(given: Arrays) -> Arrays:
        made = call(graph_inputs(taken, given))
        return {name: made[name] for name in OUTPUTS}

    return run
