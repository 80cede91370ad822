"""An encoder without a model: what was chosen beside the items of a history, by the same users at about the same time."""

from genrec_item_to_item.encoder import ItemToItemEncoder

__all__ = ["ItemToItemEncoder"]
