"""Which decoder a bundle has, told without torch: a process that finds none, or none that it can serve, need not import it."""

from pathlib import Path

from pydantic import ValidationError

from cluster.bundle import DECODER, Bundle
from cluster.errors import BundleError
from cluster.registry import DECODERS
from integrations.decoder.config import DecoderConfig


def decoder_config(bundle: Bundle) -> DecoderConfig:
    """Raises BundleError where this version has no decoder, or one that this release does not understand."""
    record = bundle.decoder()
    if record.family not in DECODERS:
        raise BundleError(f"the decoder of {bundle.version} is a {record.family!r}; this release serves {', '.join(DECODERS)}")
    try:
        return DecoderConfig.model_validate(record.config)
    except ValidationError as error:
        raise BundleError(f"the decoder of {bundle.version} is not one this release understands: {error}") from error


def verified_decoder(bundle: Bundle) -> Path:
    """The directory in Hugging Face format, once every file of the generative stage has its checksum. Raises BundleError."""
    decoder_config(bundle)
    bundle.verify_generative()
    if bundle.semantic_ids.version != bundle.decoder().semantic_ids:
        raise BundleError(f"the decoder of {bundle.version} was trained on other semantic IDs than stand beside it; train it again")
    return bundle.path / DECODER
