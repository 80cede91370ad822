"""An encoder for a cluster that is looked at: it notes each request, and takes its time where a file says so."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from ray import serve

from cluster.bundle import Bundle
from cluster.values import Encoded, EncodeRequest
from integrations.hstu.encoder import TorchEncoder

SLOW_S = 0.25
"""What a slow one takes more for each batch: about ten times a whole request's time on two cores that a cluster shares."""


class NotingTorch(TorchEncoder):
    """PyTorch, eager. In the model's directory, files named by the replica: `noted-ID`, a line of JSON for each batch, and `slow-ID`."""

    name = "torch"

    def load(self, bundle: Bundle) -> None:
        replica = serve.get_replica_context().replica_id.unique_id
        self._notes, self._slow = (file_of(bundle.path.parent, what, replica) for what in ("noted", "slow"))
        super().load(bundle)

    def batch_infer(self, requests: Sequence[EncodeRequest]) -> list[Encoded]:
        hits, misses = self._lookups()
        answers = super().batch_infer(requests)
        if self._slow.exists():
            time.sleep(SLOW_S)
        users = [f"{request.tenant}/{request.user_id}" if request.user_id else "" for request in requests]
        found, missed = self._lookups()
        with self._notes.open("a") as notes:
            notes.write(json.dumps({"users": users, "hits": found - hits, "misses": missed - misses}) + "\n")
        return answers

    def _lookups(self) -> tuple[float, float]:
        kept = self.kept()
        return kept.get("hits", 0.0), kept.get("misses", 0.0)


def file_of(model_dir: Path, what: str, replica: str) -> Path:
    """A replica's file."""
    return model_dir / f"{what}-{replica}"
