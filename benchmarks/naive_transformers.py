"""The baseline of generator_latency: Hugging Face's own beam search, one user at a time, as its documentation shows it."""

from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from cluster.bundle import DECODER, Bundle
from cluster.values import Generated, GenerateRequest
from integrations.decoder.files import load_soft_prompt


class NaiveTransformers:
    """`generate` with num_beams, the soft prompt as inputs_embeds and the trie as prefix_allowed_tokens_fn. It answers by the exact rule
    of our beam: probabilities are renormalised over what is allowed, and no length penalty applies. `blocked` and `among` are ignored.
    """

    def __init__(self, bundle: Bundle) -> None:
        decoder: torch.nn.Module = LlamaForCausalLM.from_pretrained(bundle.path / DECODER)
        self._lm: Any = decoder.eval()
        self._prompt, self._ids = load_soft_prompt(bundle), bundle.semantic_ids
        self._items = {tuple(path): item for item, path in enumerate(self._ids.tokens.tolist()) if item}
        self._allowed: dict[tuple[int, ...], set[int]] = {}
        for path in self._items:
            for level, token in enumerate(path):
                self._allowed.setdefault(path[:level], set()).add(token)

    @torch.inference_mode()
    def infer(self, request: GenerateRequest) -> Generated:
        rows = self._prompt.of([request.user])[0].unsqueeze(0)
        found: Any = self._lm.generate(
            inputs_embeds=rows,
            attention_mask=torch.ones(rows.shape[:2], dtype=torch.long),
            num_beams=request.beam,
            num_return_sequences=request.k,
            max_new_tokens=self._ids.levels,
            do_sample=False,
            length_penalty=0.0,
            renormalize_logits=True,
            pad_token_id=0,
            prefix_allowed_tokens_fn=lambda _, codes: list(self._allowed.get(tuple(codes.tolist()), {0})),
            return_dict_in_generate=True,
            output_scores=True,
        )
        items = [self._items[tuple(path)] for path in found.sequences.tolist()]
        return Generated(np.array(items, np.int32), found.sequences_scores.numpy())
