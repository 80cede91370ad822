"""Which flags a request is answered with: the configured ones, with those of the trial under which its user is served in their place."""

from collections.abc import Callable

from msgspec.structs import replace

from cluster.config import FlagSettings
from cluster.fleet.rollout import Trial, said_flags
from cluster.values import RecommendRequest


class Flags:
    """`configured`: for every user, and may change while requests are served. `trial_for`: gives the trial of a user, by tenant and id."""

    def __init__(self, configured: FlagSettings, trial_for: Callable[[str, str], Trial | None]) -> None:
        self.configured, self._trial_for = configured, trial_for

    def apply(self, request: RecommendRequest, *, generates: bool) -> RecommendRequest:
        """The request, with its user's flags where it leaves a choice open. `generates`: whether the answering version has a decoder."""
        flags = self._of(request.tenant, request.user_id)
        request = replace(request, cache="bypass") if not flags.cache else request
        if flags.strategy is None or request.strategy is not None or (flags.strategy == "generative" and not generates):
            return request
        sampling = None if flags.strategy == "retrieval" else request.sampling  # sampling draws generated items, and none are
        return replace(request, strategy=flags.strategy, sampling=sampling)

    def anticipates(self, tenant: str, user_id: str) -> bool:
        """Whether the user's next answer is computed ahead."""
        flags = self._of(tenant, user_id)
        return flags.anticipate and flags.cache

    def tried(self, request: RecommendRequest) -> str:
        """The flags that a trial tries on the request's user, as metrics name them; "" where none does."""
        trial = self._trial_for(request.tenant, request.user_id)
        return said_flags(trial.flags) if trial else ""

    def _of(self, tenant: str, user_id: str) -> FlagSettings:
        trial = self._trial_for(tenant, user_id)
        return self.configured.model_copy(update=trial.flags) if trial else self.configured
