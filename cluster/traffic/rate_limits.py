"""What each tenant may ask for: token buckets, with time passed in.

A bucket holds `burst` tokens at most and gains `per_s` a second; a request takes one. Within any t seconds it gives burst + per_s x t at
most. The limits are the cluster's: a gateway that is one of n gives its share, 1/n of both, for requests spread evenly over gateways. A
call that costs more than a share is given by a full bucket, which then owes the rest.
"""

from collections import OrderedDict
from dataclasses import dataclass

from cluster.config import RateLimit, RateLimitSettings

MOST_TENANTS = 10_000
_STRANGERS = ""  # no tenant's name is empty


@dataclass(slots=True)
class Bucket:
    """`tokens` as of the time `at`."""

    tokens: float
    at: float

    def fill(self, per_s: float, burst: float, now: float) -> None:
        self.tokens, self.at = min(burst, self.tokens + max(0.0, now - self.at) * per_s), now


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to a request for tokens. `wait_s`: until there are enough, 0 where they were given; `reset_s`: until the bucket is full.

    `limit`: tokens in a full bucket of this gateway; `most`: of the whole cluster. A call that costs more than `most` is never given.
    """

    limit: int
    most: int
    remaining: int
    wait_s: float
    reset_s: float

    @property
    def given(self) -> bool:
        return self.wait_s == 0


class RateLimiter:
    """One gateway's buckets, `most_tenants` of them. Beyond that, further tenants that the configuration does not name share one bucket."""

    def __init__(self, settings: RateLimitSettings, most_tenants: int = MOST_TENANTS) -> None:
        self._settings, self._most = settings, most_tenants
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()  # the one that was asked last at the end

    def reconfigure(self, settings: RateLimitSettings) -> None:
        """Go on under other limits; buckets keep what they hold, up to the new burst."""
        self._settings = settings

    def take(self, tenant: str, cost: int, now: float, gateways: int = 1, paid: int = 0) -> Grant | None:
        """Take `cost` tokens, all or none; None where the tenant has no limit. `paid`: how many of them the call has taken before."""
        limit = self._limit_of(tenant)
        if limit is None:
            return None
        per_s, burst = limit.per_s / gateways, max(1.0, limit.burst / gateways)
        bucket = self._bucket(tenant, burst, now, gateways)
        bucket.fill(per_s, burst, now)
        missing = (cost if cost > limit.burst else min(cost, burst) - paid) - bucket.tokens
        if missing <= 0:
            bucket.tokens -= cost - paid
        wait_s = (missing + paid) / per_s if missing > 0 else 0.0  # the next call takes what is `paid` once more
        return Grant(int(burst), int(limit.burst), max(0, int(bucket.tokens)), wait_s, (burst - bucket.tokens) / per_s)

    def _limit_of(self, tenant: str) -> RateLimit | None:
        return self._settings.tenants.get(tenant, self._settings.default)

    def _bucket(self, tenant: str, burst: float, now: float, gateways: int) -> Bucket:
        bucket = self._buckets.get(tenant)
        if bucket is None:
            if tenant not in self._settings.tenants and not self._has_room(now, gateways):
                tenant = _STRANGERS
            bucket = self._buckets.setdefault(tenant, Bucket(burst, now))
        self._buckets.move_to_end(tenant)
        return bucket

    def _has_room(self, now: float, gateways: int) -> bool:
        """Whether one more bucket can be kept. The one asked longest ago is dropped where it is full by now, as a new one would be."""
        if len(self._buckets) < self._most:
            return True
        tenant, bucket = next(iter(self._buckets.items()))
        limit = self._limit_of(tenant)
        if limit is not None and bucket.tokens + (now - bucket.at) * limit.per_s / gateways < max(1.0, limit.burst / gateways):
            return False
        del self._buckets[tenant]
        return True
