"""HSTU's attention, gated normalisation and append as Triton kernels, and its projection as a CUTLASS one, for NVIDIA GPUs.

    rows.py                which rows of a batch belong to which user
    tiles.py               functions on the device, on a tile of rows and keys; sizes of tiles
    attention.py           attention of ragged or padded rows, with gradients
    norm_mul_dropout.py    dropout(U * LayerNorm(A V)), with gradients
    append.py              new rows against kept keys and values and against each other
    gemm_silu.py           SiLU(x W) of the projection, in CUTLASS's Python (CuTe DSL)
    gemm_silu_inputs.py    what that takes
    projection.py          the projection: torch's or gemm_silu, and why not
    gpu.py                 whether there is a GPU for all of these
    reference.py           the same four in plain torch: what the kernels are tested against
    fused.py               HSTU on these kernels
    buckets.py             inputs padded up to shapes that were recorded, as CUDA graphs
    encoder.py             the encoder backend

Where there is no GPU the Triton kernels run in its interpreter, which TRITON_INTERPRET=1 chooses before triton is imported. The rows, the
reference, the buckets, the projection and the encoder can be imported without triton and nvidia-cutlass-dsl.
"""
