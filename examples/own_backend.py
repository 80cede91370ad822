"""A backend of your own: a user is the mean of the last items' vectors. No file of genrec is edited; to serve it, put this file where the
cluster's processes import from, and write in ray_config.yaml: encoder: {backends: {mean: "own_backend:MeanEncoder"}, order: [mean, torch]}.
A package would name it in its pyproject.toml instead: [project.entry-points."genrec.backends"]  "encoder.mean" = "own_backend:MeanEncoder".
`get_availability` is asked every few seconds, so it must be cheap; its reason is shown to the operator and stands in the answers.
Whether it does what the encoder's stage relies on: genrec backends check own_backend:MeanEncoder (in this directory).
"""

from collections.abc import Sequence

import numpy as np
from safetensors.numpy import load_file

from cluster.bundle import WEIGHTS, Bundle
from cluster.nearest import NearestItems
from cluster.values import Availability, Encoded, EncodeRequest


class MeanEncoder:
    def get_availability(self, bundle: Bundle) -> Availability:
        family = bundle.manifest.model.family
        return Availability.yes() if family in ("hstu", "sasrec") else Availability.no(f"does not know the weights of {family} models")

    def load(self, bundle: Bundle) -> None:
        vectors = load_file(bundle.verified(WEIGHTS))["item_embedding.weight"]
        self.vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
        self.nearest = NearestItems(self.vectors)

    def infer(self, request: EncodeRequest) -> Encoded:
        return self.batch_infer([request])[0]

    def batch_infer(self, requests: Sequence[EncodeRequest]) -> list[Encoded]:
        means = np.array([self.vectors[one.sequence.items[-10:]].mean(axis=0) for one in requests]).reshape(-1, self.vectors.shape[1])
        return self.nearest.answer(requests, means / np.linalg.norm(means, axis=1, keepdims=True).clip(1e-12))

    def close(self) -> None:
        del self.vectors, self.nearest


if __name__ == "__main__":  # python examples/own_backend.py models/ml-100k
    import asyncio
    import sys
    from pathlib import Path

    from cluster import registry
    from cluster.bundle_store import BundleStore
    from cluster.engines.controller import FrameworkController
    from cluster.engines.roster import Choice
    from cluster.engines.stage_rules import encoder_rules
    from cluster.values import UserSequence

    bundle = BundleStore(Path(sys.argv[1] if len(sys.argv) > 1 else "models/ml-100k")).open()
    table = registry.backends("encoder", {"mean": "own_backend:MeanEncoder"})
    controller = FrameworkController("encoder", Choice(table, ["mean", "torch"]), bundle, encoder_rules(len(bundle.catalogue)))
    liked = np.argsort(-bundle.popularity, kind="stable")[:3].astype(np.int32)
    history = UserSequence(liked, np.arange(3, dtype=np.int64), np.zeros(3, np.int8), np.full(3, np.nan, np.float32), request_time=4)
    served = asyncio.run(controller.call_one(EncodeRequest(history, top_n=5)))
    print(controller.explain())
    print("liked:", ", ".join(bundle.catalogue[int(item)].title for item in liked))
    print(f"next, says {served.backend}:", ", ".join(bundle.catalogue[int(item)].title for item in served.answer.items))
