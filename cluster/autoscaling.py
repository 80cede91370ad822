"""How many replicas the generator needs. Serve ships this file's text to its controller, so nothing of genrec is imported here.

`ray_config.yaml` names `by_queues` as the generator's policy; Serve applies the factors, delays and bounds that stand beside it.
"""

from collections.abc import Mapping
from typing import Any

TARGETS: Mapping[str, float] = {"waiting": 64.0, "kv_cache_usage": 0.8}
"""What one replica should have at most: paths that wait, and the share of the engine's cache that is filled.

A user takes a beam's width of paths, 20 by default, so that about three users wait.
"""


def wanted_replicas(ongoing: float, target_ongoing: float, queues: Mapping[str, Mapping[Any, float]]) -> float:
    """Enough for the figure that is furthest above its target. `queues`: figure -> replica -> value; other figures are passed over."""
    loads = [sum(of_replica.values()) / TARGETS[figure] for figure, of_replica in queues.items() if figure in TARGETS]
    return max(ongoing / target_ongoing, *loads, 0.0)


def by_queues(ctx: Any) -> tuple[float, dict[str, Any]]:
    """The policy of a deployment whose `record_autoscaling_stats` gives the figures of TARGETS. `ctx` is Serve's AutoscalingContext."""
    if not ctx.current_num_replicas:
        return ctx.target_num_replicas, {}
    return wanted_replicas(ctx.total_num_requests, ctx.config.get_target_ongoing_requests(), ctx.aggregated_metrics or {}), {}
