"""The decoder in a bundle: `decoder/` in Hugging Face format, the soft prompt's projection beside it."""

from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cluster.bundle import DECODER, SEMANTIC_IDS, SOFT_PROMPT, Bundle, DecoderRecord
from cluster.bundle_store import Draft
from cluster.errors import BundleError
from cluster.semantic_ids import write_semantic_ids
from integrations.decoder.published import decoder_config
from integrations.decoder.soft_prompt import SoftPrompt

if TYPE_CHECKING:
    from integrations.decoder.model import SemanticIdDecoder  # imports transformers, which serving need not


def load_soft_prompt(bundle: Bundle) -> SoftPrompt:
    """The bundle's soft prompt, ready to answer (eval mode, on the CPU). Raises BundleError."""
    prompt = SoftPrompt(bundle.item_vectors, decoder_config(bundle).hidden)
    try:
        prompt.load_state_dict(load_file(bundle.verified(SOFT_PROMPT)))
    except (SafetensorError, RuntimeError) as error:
        raise BundleError(f"{bundle.path / SOFT_PROMPT} does not hold the soft prompt of this decoder: {error}") from error
    return prompt.eval().requires_grad_(requires_grad=False)


def save_decoder(decoder: "SemanticIdDecoder", draft: Draft) -> None:
    """Put a trained decoder, its soft prompt and its semantic IDs into a version that is being written.

    Raises BundleError where the disk does not take it.
    """
    from transformers.utils import logging  # noqa: PLC0415 - serving need not import it

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config, ids = decoder.config, decoder.ids
    prompt = {name: tensor.detach().cpu().contiguous() for name, tensor in decoder.prompt.state_dict().items()}
    try:
        decoder.lm.save_pretrained(draft.path / DECODER)
        save_file(prompt, draft.path / SOFT_PROMPT)
    except SafetensorError as error:
        raise BundleError(f"the decoder cannot be written in {draft.path}: {error}") from error
    write_semantic_ids(ids, draft.path / SEMANTIC_IDS)
    draft.decoder = DecoderRecord(
        family="llama", prompt_length=config.prompt_length, semantic_ids=ids.version, config=config.model_dump(mode="json")
    )
