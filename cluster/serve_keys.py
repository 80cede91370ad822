"""The keys of a Serve config file beside an application's ``args``. Serve takes any others in silence, so they are listed here."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SERVES_GRACE_S = 20.0
"""A deployment's graceful_shutdown_timeout_s where its configuration says nothing."""
SERVES_PORT = 8000
"""Where Serve listens if its configuration says nothing."""


class _ServesKeys(BaseModel):
    """Unknown keys are refused. `Any`: Serve itself checks the value, once Ray runs."""

    model_config = ConfigDict(extra="forbid")


class HttpOptions(_ServesKeys):
    """Where Serve listens."""

    host: str | None = None
    port: int = Field(SERVES_PORT, ge=0, le=65_535)
    root_path: Any = None
    request_timeout_s: Any = None
    keep_alive_timeout_s: Any = None
    ssl_keyfile: Any = None
    ssl_certfile: Any = None
    ssl_keyfile_password: Any = None
    ssl_ca_certs: Any = None


class RayActorOptions(_ServesKeys):
    """What a replica needs of its node."""

    num_cpus: Any = None
    num_gpus: Any = None
    memory: Any = None
    resources: Any = None
    accelerator_type: Any = None
    label_selector: Any = None
    fallback_strategy: Any = None
    runtime_env: Any = None


class Autoscaling(_ServesKeys):
    """How many replicas, by what rule."""

    min_replicas: int | None = Field(None, ge=0)
    max_replicas: int | None = Field(None, ge=1)
    initial_replicas: int | None = Field(None, ge=0)
    policy: dict[str, Any] | None = None
    target_ongoing_requests: Any = None
    metrics_interval_s: Any = None
    look_back_period_s: Any = None
    aggregation_function: Any = None
    upscale_delay_s: Any = None
    downscale_delay_s: Any = None
    downscale_to_zero_delay_s: Any = None
    upscaling_factor: Any = None
    downscaling_factor: Any = None
    smoothing_factor: Any = None
    upscale_smoothing_factor: Any = None
    downscale_smoothing_factor: Any = None


class RequestRouter(_ServesKeys):
    """Which replica a request goes to."""

    request_router_class: Any = None
    request_router_kwargs: dict[str, Any] | None = None
    request_routing_stats_period_s: Any = None
    request_routing_stats_timeout_s: Any = None
    initial_backoff_s: Any = None
    backoff_multiplier: Any = None
    max_backoff_s: Any = None


class Deployment(_ServesKeys):
    """One of an application's deployments."""

    name: str
    user_config: dict[str, Any] | None = None
    num_replicas: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    autoscaling_config: Autoscaling | None = None
    ray_actor_options: RayActorOptions | None = None
    request_router_config: RequestRouter | None = None
    graceful_shutdown_timeout_s: float = SERVES_GRACE_S
    graceful_shutdown_wait_loop_s: Any = None
    health_check_period_s: Any = None
    health_check_timeout_s: Any = None
    max_ongoing_requests: Any = None
    max_queued_requests: Any = None
    max_replicas_per_node: Any = None
    max_surge_percent: Any = None
    rolling_update_percentage: Any = None
    backpressure_config: Any = None
    deployment_actors: Any = None
    gang_scheduling_config: Any = None
    logging_config: Any = None
    placement_group_bundles: Any = None
    placement_group_bundle_label_selector: Any = None
    placement_group_strategy: Any = None


class ServeApplication(_ServesKeys):
    """One application of the file."""

    name: Any = None
    route_prefix: Any = None
    import_path: Any = None
    args: Any = None
    deployments: list[Deployment] | None = None
    runtime_env: Any = None
    host: Any = None
    port: Any = None
    logging_config: Any = None
    autoscaling_policy: Any = None
    external_scaler_enabled: Any = None


class ServeFile(_ServesKeys):
    """The file itself, less the keys that begin with `x-`, which hold anchors; its applications are looked at one by one."""

    applications: Any = None
    proxy_location: Any = None
    http_options: HttpOptions | None = None
    grpc_options: Any = None
    logging_config: Any = None
    tracing_config: Any = None
    controller_options: Any = None
    target_capacity: Any = None
