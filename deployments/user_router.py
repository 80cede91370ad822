"""Serve's request router, with homes for users: `cluster.traffic.user_router` between the gateway's handle and the replicas of the encoder.

In ray_config.yaml:

request_router_config:
  request_router_class: "deployments.user_router:UserAffinityRouter"
  request_router_kwargs: {bound: 1.25, slack: 8}
"""

from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, RunningReplica

from cluster.errors import ConfigError
from cluster.traffic.user_router import BOUND, SLACK, choose, user_key
from deployments.routers import RankingRouter, refuse


class UserAffinityRouter(RankingRouter):
    """Routes a request to its user's home unless that is busy, and a request without a user by Serve's power of two choices.

    The user is the handle's `session_id` if given, else the request's.
    """

    def initialize_state(self, bound: float = BOUND, slack: int = SLACK, **unknown: Any) -> None:
        """The keys of `request_router_kwargs`. Raises ConfigError."""
        refuse(unknown, "UserAffinityRouter", "bound and slack")
        if not bound >= 1 or not isinstance(slack, int) or slack < 0:
            raise ConfigError(f"bound is {bound} and slack {slack}; give a bound of 1 or more and a slack of 0 or more requests")
        self._bound, self._slack = bound, slack

    def rank(self, replicas: Mapping[str, RunningReplica], loads: Mapping[str, int], request: PendingRequest) -> list[str] | None:  # noqa: ARG002
        user = _user_of(request)
        return choose(user, loads, self._bound, self._slack) if user else None


def _user_of(pending: PendingRequest) -> str:
    session: str = pending.metadata.session_id
    return session or next(filter(None, map(user_key, pending.args)), "")
