"""A recurrent generator: it reads a history code by code into a state of constant size, where a transformer keeps a cache that grows."""

from genrec_rwkv.generator import RwkvGenerator

__all__ = ["RwkvGenerator"]
