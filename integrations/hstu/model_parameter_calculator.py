"""The size of a model and the cost of a batch, from the configuration alone: parameters, FLOPs, memory.

    size = model_size(HSTUConfig(items=3883), batch=8, length=200)
    size.parameters, size.encode_flops, size.kv_bytes

Shapes: B users, L events, D = `dim`, H heads, K = `attention_dim`, W = `linear_dim`. A multiply-add counts as two operations; only
matrix products are counted, as torch.utils.flop_counter does.
"""

from dataclasses import dataclass
from itertools import pairwise

from cluster.values import Action
from integrations.hstu.config import HSTUConfig, RankerConfig, SASRecConfig, SequenceConfig
from integrations.hstu.limits import block_ends, blocks_worth, rows_at_once


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model and of encoding one padded batch. Bytes are those of the given width of a number."""

    parameters: int
    embedding_parameters: int
    encode_flops: int
    score_flops: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    kv_bytes_per_event: int


def model_size(config: SequenceConfig, *, batch: int = 1, length: int | None = None, bytes_per_number: int = 4) -> ModelSize:
    """The sizes for B = `batch` histories of L = `length` events (default: the model's longest)."""
    rows = length or config.max_history
    embeddings = (config.items + 1 + config.max_length) * config.dim
    parameters = embeddings + config.layers * _layer_parameters(config) + _ranking_parameters(config)
    per_event = config.layers * _kv_width(config) * bytes_per_number
    return ModelSize(
        parameters=parameters,
        embedding_parameters=embeddings,
        encode_flops=config.layers * _layer_flops(config, batch, rows),
        score_flops=2 * batch * rows * config.dim * (config.items + 1),
        weight_bytes=parameters * bytes_per_number,
        activation_bytes=_activation_bytes(config, batch, rows, bytes_per_number),
        kv_bytes=batch * rows * per_event,
        kv_bytes_per_event=per_event,
    )


def append_bytes(config: HSTUConfig, batch: int, most_pairs: int) -> int:
    """The most bytes in use at once while a graph appends the longest histories of `batch` users for which nothing is kept: in groups and
    steps of at most so many pairs, as append_inputs.py makes them.

    A step holds three tensors of a number for each pair and head, and the bias, time buckets and distances of each pair; a group its kept
    rows, the new ones of each step, and those of all steps.
    """
    longest = config.max_history
    new = min(longest, rows_at_once(config, most_pairs))
    pairs = new * longest
    users = min(batch, max(1, most_pairs // (config.heads * pairs)))
    return users * (pairs * (3 * config.heads * 4 + 16) + 3 * longest * config.layers * _kv_width(config) * 4)


def _layer_parameters(config: SequenceConfig) -> int:
    if isinstance(config, HSTUConfig):
        mixed = config.heads * config.linear_dim
        biases = (2 * config.max_length - 1) + (config.time_buckets + 1)
        return config.dim * _projected(config) + mixed * config.dim + config.dim + biases
    return 4 * _linear(config.dim, config.dim) + 4 * config.dim + 2 * config.dim * _hidden(config) + _hidden(config) + config.dim


def _ranking_parameters(config: SequenceConfig) -> int:
    """A ranker's further parameters: the embeddings of actions, the two directions, the sharpness, and the heads."""
    if not isinstance(config, RankerConfig):
        return 0
    heads = _linear(config.dim, 2 * config.dim) + _linear(2 * config.dim, len(config.tasks))
    return len(Action) * config.dim + 2 * config.dim + 1 + heads


def _layer_flops(config: SequenceConfig, batch: int, rows: int) -> int:
    if isinstance(config, HSTUConfig):
        mixed = config.heads * config.linear_dim
        pairs = sum((end - first) * end for first, end in pairwise(_block_ends(config, batch, rows)))
        attention = config.heads * pairs * (config.attention_dim + config.linear_dim)
        return 2 * batch * (rows * config.dim * (_projected(config) + mixed) + attention)
    return 2 * batch * rows * (4 * config.dim**2 + 2 * rows * config.dim + 2 * config.dim * _hidden(config))


def _activation_bytes(config: SequenceConfig, batch: int, rows: int, width: int) -> int:
    """The most bytes in use at once in eager inference: a block's (B, H, rows, L) attention and the tensors that it is made from.

    HSTU holds the biased products and SiLU of them, the bias, and every block's 32-bit time buckets and 64-bit distances, which all users
    share; SASRec's attention kernel works in blocks of its own.
    """
    if isinstance(config, HSTUConfig):
        ends = _block_ends(config, batch, rows)
        last = (rows - ends[-2]) * rows * (2 * config.heads * width + width)
        pairs = sum((end - first) * end for first, end in pairwise(ends))
        return batch * (last + 4 * pairs + rows * (2 * _projected(config) + 2 * config.dim) * width) + 8 * pairs
    return batch * rows * (6 * config.dim + _hidden(config)) * width


def _block_ends(config: HSTUConfig, batch: int, rows: int) -> list[int]:
    return block_ends(rows, blocks_worth(config, batch, rows))


def _kv_width(config: SequenceConfig) -> int:
    if isinstance(config, HSTUConfig):
        return config.heads * (config.attention_dim + config.linear_dim)
    return 2 * config.dim


def _projected(config: HSTUConfig) -> int:
    return 2 * config.heads * (config.attention_dim + config.linear_dim)


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def _hidden(config: SequenceConfig) -> int:
    return config.feedforward_dim if isinstance(config, SASRecConfig) else 0
