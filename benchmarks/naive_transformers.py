"""The baseline of generators: Hugging Face's own beam search, as its documentation shows it."""

from collections.abc import Sequence
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

    def __init__(self, bundle: Bundle, device: str = "cpu") -> None:
        decoder: torch.nn.Module = LlamaForCausalLM.from_pretrained(bundle.path / DECODER)
        self._lm: Any = decoder.eval().to(device)
        self._device = device
        self._prompt, self._ids = load_soft_prompt(bundle), bundle.semantic_ids
        self._items = {tuple(path): item for item, path in enumerate(self._ids.tokens.tolist()) if item}
        self._allowed: dict[tuple[int, ...], set[int]] = {}
        for path in self._items:
            for level, token in enumerate(path):
                self._allowed.setdefault(path[:level], set()).add(token)

    def infer(self, request: GenerateRequest) -> Generated:
        return self.batch_infer([request])[0]

    @torch.inference_mode()
    def batch_infer(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Of requests with prompts of one length that ask for as many items by as wide a beam."""
        rows = torch.stack(self._prompt.of([request.state for request in requests])).to(self._device)
        beam, k = requests[0].beam, requests[0].k
        found: Any = self._lm.generate(
            inputs_embeds=rows,
            attention_mask=torch.ones(rows.shape[:2], dtype=torch.long, device=self._device),
            num_beams=beam,
            num_return_sequences=k,
            max_new_tokens=self._ids.levels,
            do_sample=False,
            length_penalty=0.0,
            renormalize_logits=True,
            pad_token_id=0,
            prefix_allowed_tokens_fn=lambda _, codes: list(self._allowed.get(tuple(codes.tolist()), {0})),
            return_dict_in_generate=True,
            output_scores=True,
        )
        items = np.array([self._items[tuple(path)] for path in found.sequences.tolist()], np.int32).reshape(-1, k)
        scores = found.sequences_scores.cpu().numpy().reshape(-1, k)
        return [Generated(*answer) for answer in zip(items, scores, strict=True)]
