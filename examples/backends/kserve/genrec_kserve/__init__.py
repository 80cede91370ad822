"""An encoder elsewhere: a model's ONNX graph behind a server that speaks the Open Inference Protocol v2 (KServe, Triton, MLServer)."""

from genrec_kserve.encoder import KServeEncoder

__all__ = ["KServeEncoder"]
