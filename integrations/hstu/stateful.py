"""Answer from what is kept of a user: only the events since the last request are encoded.

    history -> window -> rows' identities -> store.match -> kept K^T, V -> append (rows kept..n-1) -> store.commit (rows kept..n-2)
                                                                                                   -> latest states -> nearest items

The engine is a function, `RunAppend`: the ONNX graph, an engine built from it, or the torch model. Any error here costs time, and no
answer: the request is answered by encoding all of its events, as without kept rows, and the rows kept of its user are dropped. Of a batch
that is the group that is computed together, or the one user with rows that could not be kept.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeAlias

import numpy as np
from msgspec.structs import replace

from cluster.bundle import WEIGHTS, Bundle
from cluster.engines.buffers import BufferPool
from cluster.errors import ConfigError
from cluster.nearest import NearestItems
from cluster.values import Encoded, EncodeRequest, FloatArray
from integrations.hstu.append_inputs import AppendInputs, AppendRequest, Arrays, Shapes, groups, in_steps
from integrations.hstu.config import HSTUConfig
from integrations.hstu.limits import limits, row_blocks
from integrations.hstu.model_parameter_calculator import model_size
from integrations.hstu.state.device import DeviceTier
from integrations.hstu.state.keeper import StateKeeper
from integrations.hstu.state.rows import identities
from integrations.hstu.state.store import Owner, StateStore
from integrations.hstu.state_options import StateOptions, make_store
from integrations.hstu.user_behavior_schema import BehaviourBatch

RunAppend: TypeAlias = Callable[[Arrays], Arrays]
"""Inputs of the append by name -> `states` (B, S, D), `kt` (layers, B, H, K, S) and `v` (layers, B, H, S, W) of the new rows."""
FullPath: TypeAlias = Callable[[Sequence[EncodeRequest], BehaviourBatch], list[Encoded]]

_LOG = logging.getLogger(__name__)
COMPLAINT = "kept states could not be used; such requests are encoded whole"


class KeptStates(StateKeeper):
    """The users' states of one encoder and one model. For one thread at a time; `statistics` may be called from any."""

    def __init__(
        self,
        bundle: Bundle,
        run: RunAppend,
        options: StateOptions,
        store: StateStore | None = None,
        pool: BufferPool | None = None,
        *,
        shapes: Shapes | None = None,
    ) -> None:
        """`store`: by default made by the options; `pool`, `shapes`: as in AppendInputs. Raises ConfigError where no row fits."""
        config = HSTUConfig.model_validate(bundle.manifest.model.config)
        store = store or make_store(config, options, with_states=bool(bundle.prompt_length))
        super().__init__(store, bundle.manifest.files[WEIGHTS].sha256, COMPLAINT)
        self.run, self.keep_from, self._prompt_length = run, options.keep_from, bundle.prompt_length
        self.inputs, self._row_bytes = AppendInputs(config, pool, shapes), model_size(config).kv_bytes_per_event
        self._shortest = row_blocks(config.max_history)

    def close(self) -> None:
        """Give back the store's resources other than memory."""
        if isinstance(self.store, DeviceTier):
            self.store.close()

    def statistics(self) -> dict[str, float]:
        """As of any StateKeeper, and those of the memory in which kept rows lie side by side."""
        return super().statistics() | self.inputs.statistics()

    def answer(self, requests: Sequence[EncodeRequest], batch: BehaviourBatch, index: NearestItems, full: FullPath) -> list[Encoded]:
        """Every request's answer, in order: from kept rows, or by `full` where none are kept or they could not be used."""
        states = self.encode(requests, batch)
        answers: dict[int, Encoded] = {}
        if rest := [row for row in range(len(requests)) if row not in states]:
            answers.update(zip(rest, full([requests[row] for row in rest], batch.take(rest, self._shortest)), strict=True))
        if states:
            asked = [requests[row] for row in states]
            nearest = index.answer(asked, np.stack([states_TD[-1] for states_TD in states.values()]))
            answers.update(
                (row, replace(answer, states=states_TD) if self._prompt_length and requests[row].states else answer)
                for (row, states_TD), answer in zip(states.items(), nearest, strict=True)
            )
        return [answers[row] for row in range(len(requests))]

    def rows(self, request: EncodeRequest, length: int) -> int:
        """About how many rows are computed for a request with so many events in its window."""
        if not request.user_id or length < self.keep_from:
            return length
        return 1 + self.new_rows(request.tenant, request.user_id, length - 1)  # the last row is never kept

    def encode(self, requests: Sequence[EncodeRequest], batch: BehaviourBatch) -> dict[int, FloatArray]:
        """Request's position -> its latest states (T, D), oldest first; requests that are missing are to be encoded whole.

        T is what the decoder's prompt takes or the history has, 1 where there is no decoder or the request does not ask for states.
        """
        mine = [row for row, request in enumerate(requests) if request.user_id and batch.lengths[row] >= self.keep_from]
        self.not_looked_up += len(requests) - len(mine)
        try:
            return self._encode(requests, batch, mine) if mine else {}
        except Exception as error:  # noqa: BLE001 - a state that cannot be used must not cost the answer that needs none
            self._give_up((self._owner_of(requests[row]) for row in mine), error)
            return {}

    def _encode(self, requests: Sequence[EncodeRequest], batch: BehaviourBatch, mine: Sequence[int]) -> dict[int, FloatArray]:
        states: dict[int, FloatArray] = {}
        with ExitStack() as held:
            users = [self._matched(held, row, requests[row], batch) for row in mine]
            shapes = self.inputs.shapes
            for group in groups(users, self._row_bytes, shapes):
                try:
                    outputs = in_steps(self.run, self.inputs.of(group, batch), shapes)
                except Exception as error:  # noqa: BLE001 - as in `encode`, and other groups have their answers
                    self._give_up((user.held.owner for user in group), error)
                    continue
                for column, user in enumerate(group):
                    try:
                        new_states = outputs["states"][column, : user.new]
                        states[user.index] = self._latest(user, new_states, self._prompt_length if requests[user.index].states else 1)
                        self._keep(user, column, new_states, outputs)
                    except Exception as error:  # noqa: BLE001 - as above, and a state that is there is an answer
                        self._give_up([user.held.owner], error)
        return states

    def _matched(self, held: ExitStack, row: int, request: EncodeRequest, batch: BehaviourBatch) -> AppendRequest:
        length = int(batch.lengths[row])
        times = batch.times[row, :length].astype(np.int64) + request.sequence.request_time  # as the model sees them: clipped
        rows = identities(batch.items[row, :length], times)
        kept = self.store.match(self._owner_of(request), rows)
        held.callback(self.store.release, kept)
        return AppendRequest(row, kept, rows, length)

    def _keep(self, user: AppendRequest, column: int, new_states: FloatArray, outputs: Arrays) -> None:
        """Keep the rows that are final now."""
        if final := user.new - 1:
            rows = {"kt": outputs["kt"][:, column, :, :, :final], "v": outputs["v"][:, column, :, :final]}
            states = {"states": new_states[:final]} if self._prompt_length else {}
            self.store.commit(user.held, user.rows, user.kept, {**rows, **states})

    def _latest(self, user: AppendRequest, new_states: FloatArray, most: int) -> FloatArray:
        """The latest states, `most` of them and one at least, copied: those of kept rows, then those of new rows. Raises ValueError where
        these are not finite.
        """
        if not np.isfinite(new_states).all():
            raise ValueError("the state after a kept one is not finite")
        first = max(0, user.length - max(1, most))
        latest = np.empty((user.length - first, new_states.shape[1]), np.float32)
        from_kept = max(0, user.kept - first)
        if from_kept:
            user.held.read({"states": latest}, first, user.kept)
        latest[from_kept:] = new_states[max(0, first - user.kept) :]
        return latest

    def _owner_of(self, request: EncodeRequest) -> Owner:
        return self._owner(request.tenant, request.user_id)


def states_if_any(engine: str, bundle: Bundle, options: StateOptions, keep: Callable[[], KeptStates]) -> KeptStates | None:
    """The states that `keep` makes; None where none are kept for such a model, or its append cannot be opened, which is logged."""
    if bundle.manifest.model.family != "hstu" or not options.keeps_of(limits(bundle.manifest.model).max_history):
        return None
    try:
        return keep()
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - an engine may raise anything, and serves without state
        _LOG.warning("%s keeps no user's state: %s", engine, error)
        return None
