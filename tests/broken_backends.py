"""Backends that do what backends must not, each of them one thing. `genrec backends check` finds it."""

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from cluster.bundle import Bundle
from cluster.nearest import NearestItems
from cluster.ranking import Ranked, RankRequest
from cluster.trie import Trie
from cluster.values import Availability, Encoded, EncodeRequest, Generated, GenerateRequest


class Sound:
    """An encoder that does everything right: a user is the mean of the last items' vectors."""

    def get_availability(self, bundle: Bundle) -> Availability:
        return Availability.yes()

    def load(self, bundle: Bundle) -> None:
        self.vectors = bundle.item_vectors
        self.nearest = NearestItems(self.vectors)

    def infer(self, request: EncodeRequest) -> Encoded:
        return self.batch_infer([request])[0]

    def batch_infer(self, requests: Sequence[EncodeRequest]) -> list[Encoded]:
        states = [self.state(request) for request in requests]
        return self.nearest.answer(requests, np.array(states, np.float32).reshape(len(requests), self.vectors.shape[1]))

    def state(self, request: EncodeRequest) -> Any:
        mean = self.vectors[request.sequence.items[-10:]].mean(axis=0)
        return mean / np.linalg.norm(mean)

    def close(self) -> None:
        self.__dict__.clear()


class AnswersBackwards(Sound):
    def batch_infer(self, requests):
        return super().batch_infer(requests)[::-1]


class ProbeRaises(Sound):
    def get_availability(self, bundle):
        raise RuntimeError("no driver")


class ProbeGivesNoReason(Sound):
    def get_availability(self, bundle):
        return Availability.no("")


class ProbeGivesAnErrorAsReason(Sound):
    def get_availability(self, bundle):
        return Availability.no(OSError("no device"))


class ProbeSaysNoAsText(Sound):
    def get_availability(self, bundle):
        return Availability("no")


class ProbeIsSlow(Sound):
    def get_availability(self, bundle):
        time.sleep(0.3)
        return Availability.yes()


class IsNotHere(Sound):
    def get_availability(self, bundle):
        return Availability.no("there is no such accelerator here; attach one")


class AnswersNaN(Sound):
    def batch_infer(self, requests):
        return [replace(answer, scores=np.full_like(answer.scores, np.nan)) for answer in super().batch_infer(requests)]


class FindsFewItems(Sound):
    def batch_infer(self, requests):
        return [replace(answer, items=answer.items[:6], scores=answer.scores[:6]) for answer in super().batch_infer(requests)]


class IgnoresAmong(Sound):
    def batch_infer(self, requests):
        return super().batch_infer([replace(request, among=None) for request in requests])


class GivesWideStates(Sound):
    """Those of a layer within, twice as wide as what the decoder was trained on."""

    def batch_infer(self, requests):
        answers = super().batch_infer(requests)
        wide = [np.repeat(answer.state, 2) / np.float32(2**0.5) for answer in answers]
        return [replace(answer, state=state, states=state[None]) for answer, state in zip(answers, wide, strict=True)]


class NeedsArguments(Sound):
    def __init__(self, url):
        self.url = url


class LacksMethods:
    def get_availability(self, bundle):
        return Availability.yes()


class BreaksAtLongHistories(Sound):
    def state(self, request):
        if len(request.sequence) > 64:
            raise IndexError("position 64 is beyond the table")
        return super().state(request)


hanging = threading.Event()
"""Set once a backend hangs."""


class Hangs(Sound):
    def batch_infer(self, requests):
        if any(request.deadline for request in requests):
            hanging.set()
            time.sleep(3600)
        return super().batch_infer(requests)


class SharesMemory(Sound):
    """Every answer's state is the same buffer."""

    def load(self, bundle):
        super().load(bundle)
        self.buffer = np.zeros(16, np.float32)

    def batch_infer(self, requests):
        answers = super().batch_infer(requests)
        if len(answers) == 1:
            self.buffer[:] = answers[0].state
            return [replace(answers[0], state=self.buffer)]
        return answers


class MixesUpTenants(Sound):
    """Keeps each user's first state, by a name that two tenants may share."""

    def load(self, bundle):
        super().load(bundle)
        self.states = {}

    def state(self, request):
        if not request.user_id:
            return super().state(request)
        return self.states.setdefault(request.user_id, super().state(request))


class ForgetsNobody(Sound):
    def load(self, bundle):
        super().load(bundle)
        self.users = set()

    def state(self, request):
        self.users.add((request.tenant, request.user_id))
        return super().state(request)

    def forget(self, tenant, user):
        return int((tenant, user) in self.users)

    def kept(self):
        return {"users": float(len(self.users))}


class TakesOverWhatever(Sound):
    """Answers from the state that it was given last, whatever is asked."""

    def load(self, bundle):
        super().load(bundle)
        self.last, self.taken = {}, {}

    def state(self, request):
        of = request.tenant, request.user_id
        self.last[of] = self.taken[of] if of in self.taken else super().state(request)
        return self.last[of]

    def forget_everything(self):
        self.last, self.taken, count = {}, {}, len(self.last)
        return count

    def hand_over(self):
        return [(*of, state.tobytes()) for of, state in self.last.items()]

    def take_over(self, tenant, user, data):
        self.taken[tenant, user] = np.frombuffer(data, np.float32)
        return len(data)


class LoadsOnce(Sound):
    loads = 0

    def load(self, bundle):
        self.loads += 1
        if self.loads > 1:
            raise RuntimeError("the engine is in use")
        super().load(bundle)

    def close(self):
        del self.vectors


class ExitsAsItLoads(Sound):
    def load(self, bundle: Bundle) -> None:
        raise SystemExit(2)


class IsCancelledAsItLoads(Sound):
    """As where a task of an event loop of its own is."""

    def load(self, bundle: Bundle) -> None:
        raise asyncio.CancelledError("its own task")


class ClosesOnce(Sound):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("the device is gone")
        super().close()
        self.closed = True


class Flat:
    """A generator that does everything right: any item is as probable as another, and users differ in the order."""

    def get_availability(self, bundle: Bundle) -> Availability:
        return Availability.yes() if bundle.manifest.decoder else Availability.no("there are no semantic IDs")

    def load(self, bundle: Bundle) -> None:
        self.trie = Trie.of(bundle.semantic_ids)

    def infer(self, request: GenerateRequest) -> Generated:
        return self.batch_infer([request])[0]

    def batch_infer(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        return [self.answer(request) for request in requests]

    def answer(self, request: GenerateRequest) -> Generated:
        if not np.isfinite(request.state.states).all():
            raise ValueError("NaN in the prompt")
        asked = self.trie.items if request.among is None else np.intersect1d(self.trie.items, request.among)
        return self.some(np.setdiff1d(asked, request.blocked), request)

    def some(self, allowed, request):
        start = int(request.state.sequence.items.sum()) % max(1, len(allowed))
        chosen = np.roll(allowed, -start)[: request.k].astype(np.int32)
        return Generated(chosen, np.full(len(chosen), -np.log(max(1, len(allowed))), np.float32))

    def close(self) -> None:
        self.__dict__.clear()


class NamesBlockedItems(Flat):
    def answer(self, request):
        return super().answer(replace(request, blocked=np.empty(0, np.int32)))


class NamesNothing(Flat):
    def some(self, allowed, request):
        return Generated(np.empty(0, np.int32), np.empty(0, np.float32))


class NamesFewItems(Flat):
    def some(self, allowed, request):
        whole = super().some(allowed, request)
        return Generated(whole.items[:-1], whole.log_probs[:-1])


class StreamsNothingMuch(Flat):
    """Its streams end before the last item."""

    async def ainfer(self, request):
        return self.infer(request)

    async def astream(self, request):
        whole = self.infer(request)
        for row in range(len(whole.items) - 1):
            yield Generated(whole.items[row : row + 1], whole.log_probs[row : row + 1])


class MixesUpCalls(Flat):
    """Takes many requests at a time, and answers all with the last one's."""

    async def ainfer(self, request):
        self.request = request
        await asyncio.sleep(0)
        return self.infer(self.request)


class ForgetsACandidate:
    """A ranker."""

    def get_availability(self, bundle: Bundle) -> Availability:
        return Availability.yes()

    def load(self, bundle: Bundle) -> None:
        self.tasks = len(bundle.ranker().tasks)

    def infer(self, request: RankRequest) -> Ranked:
        return self.batch_infer([request])[0]

    def batch_infer(self, requests: Sequence[RankRequest]) -> list[Ranked]:
        return [Ranked(np.zeros((max(0, len(request.candidates) - 1), self.tasks), np.float32)) for request in requests]

    def close(self) -> None:
        pass


class ForgetsATask(ForgetsACandidate):
    def batch_infer(self, requests):
        return [Ranked(np.zeros((len(request.candidates), self.tasks - 1), np.float32)) for request in requests]


class ProbesBreakLater(Sound):
    """Its probe answers while it is checked, and raises from the next time on."""

    probed = 0

    def get_availability(self, bundle):
        type(self).probed += 1
        if self.probed > 5:
            raise RuntimeError("the driver is gone")
        return super().get_availability(bundle)
