"""The interface of a backend.

A backend is a class that is made without arguments, so that a table of import strings is enough to make one; optional arguments are
given under `options` in the configuration. The class need not inherit from anything here: having the methods is enough.

A backend may also have any of these, which the controller looks for:

    async ainfer(request) -> answer       many at a time on the event loop, instead of batch_infer
    astream(request) -> async iterator    pieces of the answer, each as soon as it is found
    declines(request) -> str              why the backend does not take this request; "" where it does
    alive() -> bool                       False once its engine is gone: it is then loaded anew
    condemn()                             called before `close`, in its thread, where the engine is given up as broken, stuck or gone, or
                                          could not be loaded: one that several share is then to be given to no other
    queue() -> dict[str, float]           how busy it is, for the autoscaling and for gauges: `waiting` and `running` requests,
                                          `kv_cache_usage` (0 to 1)
    brief: bool                           True where a call always returns, as a compiled graph's does, and computes in the thread that
                                          calls: what is expected to take less than 3 ms is computed on the event loop, without a thread
    rows(requests) -> int                 how many rows a call would compute for these now, about. With `brief`, a call of more rows than
                                          those before it is expected to take longer; an encoder's requests of like rows share a batch.
                                          Called on the event loop, also while a batch is computed, so it must not wait for that

A backend that keeps something of users beyond their requests may have these too:

    forget(tenant, user) -> int           erase what it keeps of a user: how many states, rows or entries that were
    forget_tenant(tenant) -> int          the same of all users of a tenant
    forget_everything() -> int            the same of all users
    kept() -> dict[str, float]            what it takes: users, rows, bytes, hits ...; replicas' figures are added up

    hand_over() -> iterator of (tenant, user, bytes)   what it keeps of users, the hottest first, for an engine of the same class, options
                                          and version of the model in another process
    take_over(tenant, user, bytes) -> int keep that, unless what is kept of the user is newer: the bytes of memory it takes; raises where
                                          the bytes are not what `hand_over` gives. Both in the thread that calls `batch_infer`

Of the first three, the narrowest that a backend has and that covers the erasure is called; of erasures in one turn, equal calls are made
once. Where it has none that is wide enough, or the call raises, the backend is unloaded: `close` frees all, and `load` starts with
nothing. They are called from the thread that calls `batch_infer`, never while it runs,
but beside `ainfer`, and twice for each erasure: once more when every request that was under way the first time is over. `kept` may be
called from any thread at any time. With `selection: fastest` such a backend is also timed with a user who returns, made up and forgotten
again. That time is weighted by the share of `hits` of `kept`, users it knew, among those, `misses`, users it did not know, and
`not_looked_up`, requests for which it looked up none.

A request that cannot be answered by its deadline raises DeadlineExceeded, or has one in its place among the answers of `batch_infer`.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

from cluster.bundle import Bundle
from cluster.values import Availability

RequestT = TypeVar("RequestT", contravariant=True)  # noqa: PLC0105 - the T says enough
AnswerT = TypeVar("AnswerT")


@runtime_checkable
class Backend(Protocol[RequestT, AnswerT]):
    """One engine that can serve a stage.

    `get_availability` answers, cheaply and before any load, whether the engine can serve this bundle here and if not, why and what to do;
    it never raises. `Availability.because(error)` says no for an error's reason: a file that could not be read just now unloads no engine.
    It is called every few seconds in a thread of its own, also while another one loads, calls or closes the engine, so it changes nothing
    that these use. One that has not ended after 30 s says no for an engine that is not loaded, and is called again once it has ended.
    `load` makes it ready to answer (raises BackendUnavailable). `infer` and `batch_infer` are called from one thread at a time and raise
    BackendFailed, or any exception, where the engine breaks; `batch_infer` answers in the order asked. `close` frees what `load` took.
    """

    def get_availability(self, bundle: Bundle) -> Availability: ...
    def load(self, bundle: Bundle) -> None: ...
    def infer(self, request: RequestT) -> AnswerT: ...
    def batch_infer(self, requests: Sequence[RequestT]) -> list[AnswerT]: ...
    def close(self) -> None: ...
