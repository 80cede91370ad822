"""Token buckets, with a clock of the test's own."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cluster.config import RateLimitSettings
from cluster.traffic.rate_limits import RateLimiter

TEN_AND_TWENTY = RateLimitSettings.model_validate(
    {"default": {"per_s": 10, "burst": 20}, "tenants": {"small": {"per_s": 1, "burst": 2}, "free": None}}
)


@pytest.fixture
def limiter():
    return RateLimiter(TEN_AND_TWENTY)


def given_of(limiter, tenant, asked, now=0.0, gateways=1):
    return sum(limiter.take(tenant, 1, now, gateways).given for _ in range(asked))


def test_a_burst_is_given_at_once_and_then_the_rate(limiter):
    assert given_of(limiter, "shop", 50) == 20
    assert given_of(limiter, "shop", 50, now=1.5) == 15


def test_tenants_have_limits_of_their_own(limiter):
    assert given_of(limiter, "small", 50) == 2
    assert given_of(limiter, "shop", 50) == 20
    assert limiter.take("free", 10**6, 0.0) is None
    assert RateLimiter(RateLimitSettings()).take("shop", 1, 0.0) is None


def test_a_refusal_says_when_to_come_again_and_then_it_is_given(limiter):
    given_of(limiter, "small", 2)
    refused = limiter.take("small", 2, 0.5)
    assert (refused.given, refused.limit, refused.remaining, refused.wait_s) == (False, 2, 0, 1.5)
    assert not limiter.take("small", 2, 1.99).given
    assert limiter.take("small", 2, 2.0).given


def test_all_tokens_are_given_or_none(limiter):
    assert limiter.take("shop", 15, 0.0).remaining == 5
    assert not limiter.take("shop", 6, 0.0).given
    assert limiter.take("shop", 5, 0.0).given


def test_each_gateway_gives_its_share(limiter):
    assert given_of(limiter, "shop", 50, gateways=4) == 5
    assert given_of(limiter, "shop", 50, now=2.0, gateways=4) == 5
    assert given_of(limiter, "small", 50, gateways=4) == 1, "one at least, or nobody would ever be let in"


def test_new_limits_count_at_once(limiter):
    given_of(limiter, "shop", 5)
    limiter.reconfigure(RateLimitSettings.model_validate({"default": {"per_s": 1, "burst": 3}}))
    assert given_of(limiter, "shop", 50) == 3


def test_strangers_share_a_bucket_once_too_many_tenants_are_known():
    limiter = RateLimiter(TEN_AND_TWENTY, most_tenants=3)
    assert [given_of(limiter, name, 50, now=0.1) for name in "abcde"] == [20, 20, 20, 20, 0]
    assert given_of(limiter, "a", 50, now=0.1) == 0, "to name many tenants refills nobody's bucket"
    assert given_of(limiter, "small", 50, now=0.1) == 2, "who has a limit of their own is no stranger"
    assert given_of(limiter, "f", 50, now=100.0) == 20, "a bucket that is full by now makes room"


def test_a_bucket_that_is_full_makes_room_where_gateways_share_the_limit_too():
    limiter = RateLimiter(TEN_AND_TWENTY, most_tenants=3)
    assert [given_of(limiter, name, 50, now=0.1, gateways=4) for name in "abcde"] == [5, 5, 5, 5, 0]
    assert given_of(limiter, "f", 50, now=2.2, gateways=4) == 5


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 10), st.sampled_from("abcd")), max_size=80),
    st.floats(0.1, 50),
    st.floats(1, 50),
    st.integers(1, 4),
)
def test_never_more_than_the_burst_and_the_rate_times_the_time(asked, per_s, burst, most_tenants):
    limiter = RateLimiter(RateLimitSettings.model_validate({"default": {"per_s": per_s, "burst": burst}}), most_tenants)
    now, given_to = 0.0, dict.fromkeys("abcd", 0)
    for pause, cost, tenant in asked:
        now += pause
        grant = limiter.take(tenant, cost, now)
        assert grant.given or grant.wait_s > 0
        given_to[tenant] += cost * grant.given
    assert all(tokens <= burst + per_s * now + 1e-6 for tokens in given_to.values())


@given(st.floats(0.1, 50), st.floats(1, 50), st.integers(1, 60))
def test_who_waits_as_long_as_told_is_let_in(per_s, burst, cost):
    limiter, now = RateLimiter(RateLimitSettings.model_validate({"default": {"per_s": per_s, "burst": burst}})), 0.0
    while limiter.take("shop", 1, now).given:
        pass
    refused = limiter.take("shop", cost, now)
    assert limiter.take("shop", cost, now + refused.wait_s + 1e-6).given == (cost <= burst)


def test_what_a_call_has_paid_before_counts_towards_a_full_bucket(limiter):
    assert limiter.take("shop", 1, 0.0, gateways=4).given
    assert limiter.take("shop", 20, 0.0, gateways=4, paid=1).given, "the bucket was full when the call came"
    assert limiter.take("shop", 1, 0.0, gateways=4).wait_s == pytest.approx(16 / 2.5), "and owes what is beyond the share"
