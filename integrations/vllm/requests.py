"""The values exchanged with vLLM: the engine's arguments, prompts, sampling parameters, statistics."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integrations.vllm.beam import Question
from integrations.vllm.library import load

if TYPE_CHECKING:
    import torch

BLOCK = 32
"""Rows of a block of the KV cache: vLLM's CPU kernels take multiples of it, and only whole blocks of a prompt are shared."""

EXECUTOR = "integrations.vllm.engine_process.HostBoundExecutor"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """VllmGenerator's options of the same names; `rows`: of the longest prompt with all its codes."""

    dtype: str
    kv_cache_bytes: int
    max_num_seqs: int
    compile: bool
    gpu_memory_share: float
    prefix_caching: bool
    rows: int


def engine_args(decoder: Path, settings: EngineSettings) -> Any:
    return load("vllm.engine.arg_utils").AsyncEngineArgs(
        model=str(decoder),
        dtype=settings.dtype,
        max_model_len=settings.rows,
        skip_tokenizer_init=True,
        enable_prompt_embeds=True,
        generation_config="vllm",  # its own defaults: the decoder's file is to change nothing
        max_logprobs=-1,
        logprobs_mode="processed_logprobs",  # after all but the allowed tokens are masked: renormalised over them
        enable_prefix_caching=settings.prefix_caching,
        block_size=BLOCK,
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        gpu_memory_utilization=settings.gpu_memory_share,
        max_num_seqs=settings.max_num_seqs,
        enforce_eager=not settings.compile,
        distributed_executor_backend=EXECUTOR,
        use_tqdm_on_load=False,
        disable_log_stats=True,
    )


class Words:
    """Makes prompts and sampling parameters. Modules are looked up once, as a user makes 41 requests."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415 - vllm has loaded it by now

        self._torch = torch
        self._embeds_input = load("vllm.inputs.engine").embeds_input
        self._sampling_params = load("vllm.sampling_params").SamplingParams

    def prompt(self, rows_TH: "torch.Tensor", suffix: tuple[int, ...], salt: str) -> Any:
        """The soft prompt and then the codes. The prompt's rows have token 0, which names nothing; the codes have rows of zeros."""
        soft, codes = len(rows_TH), len(suffix)
        rows = self._torch.cat([rows_TH, rows_TH.new_zeros(codes, rows_TH.shape[1])]) if codes else rows_TH
        return self._embeds_input(
            rows, cache_salt=salt, prompt_token_ids=[0] * soft + list(suffix), is_token_ids=[False] * soft + [True] * codes
        )

    def sampling(self, question: Question) -> Any:
        return self._sampling_params(
            max_tokens=1,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            skip_clone=True,
            allowed_token_ids=question.allowed,
            logprobs=question.best,
            flat_logprobs=True,
        )


class Statistics:
    """The engine's state after its last step. The object is a stat logger of vLLM, and also the factory that vLLM asks for one."""

    def __init__(self) -> None:
        self.running, self.kv_cache_usage, self.prefix_cache_queries, self.prefix_cache_hits = 0, 0.0, 0, 0

    def __call__(self, _config: Any, _engine: int) -> "Statistics":
        return self

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:  # noqa: ARG002
        if scheduler_stats is not None:
            self.running, self.kv_cache_usage = scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage
            self.prefix_cache_queries += scheduler_stats.prefix_cache_stats.queries
            self.prefix_cache_hits += scheduler_stats.prefix_cache_stats.hits

    def log(self) -> None:
        """Nothing is printed."""

    def log_engine_initialized(self) -> None:
        """Nothing is printed."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """The engine never sleeps."""
