"""An encoder that breaks, or is slow, in one version of a model and not in the others: what a bad release looks like."""

import time
from collections.abc import Sequence

from cluster.bundle import Bundle
from cluster.values import Encoded, EncodeRequest
from integrations.hstu.encoder import TorchEncoder

SLOW_S = 0.5


class VersionedTorch(TorchEncoder):
    """It raises as long as a file `broken` lies in its version's directory, and takes `SLOW_S` longer for `slow`."""

    name = "torch"

    def load(self, bundle: Bundle) -> None:
        self._directory = bundle.path
        super().load(bundle)

    def batch_infer(self, requests: Sequence[EncodeRequest]) -> list[Encoded]:
        if (self._directory / "broken").exists():
            raise RuntimeError(f"made to fail: {self._directory / 'broken'}")
        if (self._directory / "slow").exists():
            time.sleep(SLOW_S)
        return super().batch_infer(requests)
