"""Which decoder a bundle has, found out without torch: a process that cannot serve a decoder need not import torch."""

from pathlib import Path

from pydantic import ValidationError

from cluster.bundle import DECODER, Bundle
from cluster.errors import BundleError
from cluster.registry import DECODERS
from integrations.decoder.config import DecoderConfig


def decoder_config(bundle: Bundle) -> DecoderConfig:
    """The decoder's configuration. Raises BundleError where this version has no decoder, or one that this release does not understand."""
    record = bundle.decoder()
    if record.family not in DECODERS:
        raise BundleError(f"the decoder of {bundle.version} is a {record.family!r}; this release serves {', '.join(DECODERS)}")
    try:
        return DecoderConfig.model_validate(record.config)
    except ValidationError as error:
        raise BundleError(f"the decoder of {bundle.version} is not one this release understands: {error}") from error


def verified_decoder(bundle: Bundle) -> Path:
    """The decoder's directory, in Hugging Face format, after checking every file of the generative stage. Raises BundleError."""
    decoder_config(bundle)
    bundle.verify_generative()
    if bundle.semantic_ids.version != bundle.decoder().semantic_ids:
        raise BundleError(f"the decoder of {bundle.version} was trained on other semantic IDs than stand beside it; train it again")
    return bundle.path / DECODER
