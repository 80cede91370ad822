"""The ranker in eager PyTorch, which needs nothing compiled."""

from importlib.util import find_spec
from typing import Any

from cluster.bundle import RANKER, Bundle
from cluster.errors import BackendUnavailable
from cluster.values import FloatArray
from integrations.hstu.append_inputs import Arrays
from integrations.hstu.ranker_backend import RankerBackend
from integrations.hstu.ranking_engine import RunRank, RunRankAppend


class TorchRanker(RankerBackend):
    """Computes on the first GPU where there is one. Options as in RankerBackend."""

    def _check(self, bundle: Bundle) -> None:
        if find_spec("torch") is None:
            raise BackendUnavailable("torch is not installed; install genrec with its extra cpu")
        bundle.verified(RANKER)

    def _open(self, bundle: Bundle) -> tuple[RunRankAppend, RunRank]:
        import torch  # noqa: PLC0415 - a process that serves another engine need not pay for importing torch

        from integrations.hstu.weights import load_ranker  # noqa: PLC0415

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        ranker = load_ranker(bundle).to(device)

        def one_user(rows: Any) -> torch.Tensor:
            return torch.as_tensor(rows, device=device).unsqueeze(0)

        def past(inputs: Arrays) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
            return one_user(inputs["past_times"]), [one_user(kt) for kt in inputs["past_kt"]], [one_user(v) for v in inputs["past_v"]]

        @torch.inference_mode()
        def run_append(inputs: Arrays) -> tuple[FloatArray, FloatArray]:
            items, actions, ratings, times = (one_user(inputs[name]) for name in ("items", "actions", "ratings", "times"))
            past_times, past_kt, past_v = past(inputs)
            kt, v = ranker.append(items, actions, ratings, times, past_times, past_kt, past_v)
            return kt[:, 0].cpu().numpy(), v[:, 0].cpu().numpy()

        @torch.inference_mode()
        def run_rank(inputs: Arrays) -> FloatArray:
            past_times, past_kt, past_v = past(inputs)
            predictions: FloatArray = ranker.rank(one_user(inputs["candidates"]), past_times, past_kt, past_v)[0].cpu().numpy()
            return predictions

        return run_append, run_rank
