"""The semantic-ID decoder in PyTorch, with a beam search of our own: needs nothing but torch, on the first GPU where there is one."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

from cluster.bundle import Bundle
from cluster.engines.skipped import kind_of
from cluster.errors import BackendUnavailable, BundleError, ConfigError, UnknownChoice
from cluster.options import whole
from cluster.values import Availability, Generated, GenerateRequest
from integrations.hstu.state.eviction import PolicyName

if TYPE_CHECKING:
    from integrations.torch_beam.engine import BeamEngine

DTYPES = ("float32", "bfloat16")


class TorchBeamGenerator:
    """`dtype`: of weights and activations; scores are float32 in any case. `threads`: torch's, for this whole process;
    None leaves them as they are.

    `cache_bytes`: memory for the logits of users' prompts seen before; 0 keeps none. `prompt_bytes`: memory for keys and values of users'
    prompts, so that of a prompt that has grown only the new rows are computed; 0 keeps none. `prompt_policy`: lru, lfu or fifo.
    `share_prompts`: users of a tenant share equal rows at the beginning of their prompts, 16 at a time; useful where many histories begin
    alike.
    """

    def __init__(
        self,
        dtype: str = "float32",
        threads: int | None = None,
        cache_bytes: int = 8 << 20,
        prompt_bytes: int = 64 << 20,
        prompt_policy: PolicyName = "lru",
        *,
        share_prompts: bool = False,
    ) -> None:
        for what, name, choices in (("dtype", dtype, DTYPES), ("prompt_policy", prompt_policy, get_args(PolicyName))):
            if name not in choices:
                raise UnknownChoice(what, name, choices)
        for what, size in (("cache_bytes", cache_bytes), ("prompt_bytes", prompt_bytes)):
            if whole(what, size) < 0:
                raise ConfigError(f"{what} ({size}) must be at least 0, which keeps nothing")
        self._dtype, self._threads, self._cache_bytes = dtype, threads, cache_bytes
        self._prompts: dict[str, Any] = {"prompt_bytes": prompt_bytes, "prompt_policy": prompt_policy, "share_prompts": share_prompts}
        self._loaded: BeamEngine | None = None

    def get_availability(self, bundle: Bundle) -> Availability:
        if find_spec("torch") is None:
            return Availability.no("torch is not installed; install genrec with its extra cpu")
        try:
            bundle.verify_generative()
        except BundleError as error:
            return Availability.because(error)
        return Availability.yes()

    def load(self, bundle: Bundle) -> None:
        self.get_availability(bundle).require()
        from integrations.torch_beam.engine import BeamEngine  # noqa: PLC0415 - imports torch, which other engines' processes need not

        self._set_threads()
        try:
            self._loaded = BeamEngine(bundle, self._dtype, self._cache_bytes, **self._prompts)
        except (BundleError, ConfigError) as error:
            raise BackendUnavailable(str(error), told=kind_of(error)) from error

    def infer(self, request: GenerateRequest) -> Generated:
        return self.batch_infer([request])[0]

    def batch_infer(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """The answers in the order asked. A request past its deadline is answered nevertheless while another of its batch still has time.

        Raises BackendFailed at a prompt with a wrong shape, NaN or an unknown item, DeadlineExceeded once all deadlines are past.
        """
        engine = self._engine()
        self._set_threads()
        return engine.answer(requests)

    def forget(self, tenant: str, user: str) -> int:
        """Drop the user's prompts, and all logits, which are kept without their users; returns how many rows and entries that were."""
        return self._engine().forget(tenant, user)

    def forget_tenant(self, tenant: str) -> int:
        """As `forget`, for all users of a tenant."""
        return self._engine().forget_tenant(tenant)

    def forget_everything(self) -> int:
        """As `forget`, for all users."""
        return self._engine().forget_everything()

    def kept(self) -> dict[str, float]:
        """`users`, `rows`, `used_bytes`, `hits` ... of kept prompts; `logits_entries`, `logits_used_bytes` ... of the logits of prompts."""
        engine = self._loaded
        return engine.kept() if engine else {}

    def close(self) -> None:
        self._loaded = None

    def _set_threads(self) -> None:
        """A thread that has computed keeps its number whatever another one sets, so each that asks this engine is told."""
        import torch  # noqa: PLC0415 - as in `load`

        if self._threads and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)

    def _engine(self) -> "BeamEngine":
        if self._loaded is None:
            raise BackendUnavailable("torch_beam has not been loaded, or was closed; call load(bundle)")
        return self._loaded
