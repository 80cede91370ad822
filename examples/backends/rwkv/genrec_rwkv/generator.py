"""The backend: a prompt's items -> their codes, read one by one -> a state -> a beam over the trie of all items."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from cluster.bundle import SEMANTIC_IDS, Bundle
from cluster.errors import BackendFailed, BackendUnavailable, BundleError, DeadlineExceeded
from cluster.trie import Trie
from cluster.values import Availability, Generated, GenerateRequest
from genrec_rwkv.kept import KeptStates, Read
from genrec_rwkv.recurrent import BEGIN, Recurrent
from genrec_rwkv.search import search

TRAIN = "python -m genrec_rwkv train DATASET --model-dir models/X --out FILE"


class RwkvGenerator:
    """`weights`: the file that `train` wrote, for the semantic IDs of the model that is served. `keep_users`: of how many users the state
    is kept, so that of a history that grew only the new events are read; 0 keeps nothing.

    The prompt's states, which are the encoder's, are not read: the items are.
    """

    def __init__(self, weights: str = "", keep_users: int = 10_000) -> None:
        self._path, self._keep_users = weights, keep_users
        self._model: Recurrent | None = None
        self._kept = KeptStates(0)

    def get_availability(self, bundle: Bundle) -> Availability:
        if not self._path:
            return Availability.no(
                f"no weights are configured; train some: {TRAIN}, and set generator: {{options: {{rwkv: {{weights: FILE}}}}}}"
            )
        try:
            learnt, wanted = semantic_ids_of(Path(self._path)), bundle.decoder().semantic_ids
            bundle.verified(SEMANTIC_IDS)
        except (BackendUnavailable, BundleError) as error:
            return Availability.because(error)
        if learnt != wanted:
            return Availability.no(f"{self._path} was trained for the semantic IDs {learnt}, {bundle.version} has {wanted}; run: {TRAIN}")
        return Availability.yes()

    def load(self, bundle: Bundle) -> None:
        self.get_availability(bundle).require()
        with safe_open(self._path, "numpy") as file:
            self._model = Recurrent({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - it is no mapping
        self._ids, self._kept = bundle.semantic_ids, KeptStates(self._keep_users)
        self._trie = Trie.of(self._ids)
        logits, state = self._model.step(self._model.start(1), np.array([BEGIN]))
        self._begun = Read(np.empty(0, np.int32), state, logits)

    def declines(self, request: GenerateRequest) -> str:
        return "it searches, and draws nothing" if request.sampling else ""

    def infer(self, request: GenerateRequest) -> Generated:
        (answer,) = self.batch_infer([request])
        if isinstance(answer, DeadlineExceeded):
            raise answer
        return answer

    def batch_infer(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """With DeadlineExceeded in the place of what is late. Raises BackendFailed at an item that the model does not have."""
        if self._model is None:
            raise BackendUnavailable("rwkv has not been loaded, or was closed; call load(bundle)")
        return [self._answer(request, self._model) for request in requests]

    def forget(self, tenant: str, user: str) -> int:
        return self._kept.forget(tenant, user)

    def forget_tenant(self, tenant: str) -> int:
        return self._kept.forget(tenant)

    def forget_everything(self) -> int:
        return self._kept.forget()

    def kept(self) -> dict[str, float]:
        return self._kept.statistics()

    def close(self) -> None:
        self._model, self._kept = None, KeptStates(0)

    def _answer(self, request: GenerateRequest, model: Recurrent) -> Generated:
        if problem := self.declines(request):
            raise BackendFailed(f"rwkv does not take this request: {problem}")
        in_time = _in_time(request.deadline)
        try:
            read = self._read(request, model, in_time)
            view = self._trie.view(request.among, request.blocked)
            return search(model, read.state, read.logits, view, beam=request.beam, k=request.k, in_time=in_time)
        except DeadlineExceeded as late:
            return late  # type: ignore[return-value]  # the protocol: one late request costs its neighbours nothing

    def _read(self, request: GenerateRequest, model: Recurrent, in_time: Callable[[], None]) -> Read:
        """The state after the prompt's items, from what is kept of the user on."""
        items = request.state.sequence.items
        if (outside := items[(items < 1) | (items > self._ids.items)]).size:
            raise BackendFailed(f"item index {outside[0]} of a prompt is outside of 1..{self._ids.items}, the items of this model")
        known = self._kept.find(request.tenant, request.user_id, items) or self._begun
        state, logits = known.state, known.logits
        for codes in self._ids.tokens[items[len(known.items) :]]:
            in_time()
            for token in codes:
                logits, state = model.step(state, np.array([token]))
        read = Read(items.copy(), state, logits)
        self._kept.keep(request.tenant, request.user_id, read)
        return read


def semantic_ids_of(path: Path) -> str:
    """The version of the semantic IDs that the weights were trained for. Raises BackendUnavailable where it is no file of ours."""
    if not path.is_file():
        raise BackendUnavailable(f"{path} is not there; make it: {TRAIN.replace('FILE', str(path))}")
    try:
        with safe_open(path, "numpy") as file:
            found = (file.metadata() or {}).get("semantic_ids")
    except (SafetensorError, OSError) as error:
        raise BackendUnavailable(f"{path} holds no weights: {error}; run: {TRAIN}") from error
    if not found:
        raise BackendUnavailable(f"{path} does not say for which semantic IDs it was trained; run: {TRAIN}")
    return str(found)


def _in_time(deadline: float | None) -> Callable[[], None]:
    def check() -> None:
        if deadline is not None and (late_s := time.monotonic() - deadline) >= 0:
            raise DeadlineExceeded(f"the deadline was {late_s * 1e3:.0f} ms ago; allow more time, or a narrower beam")

    return check
