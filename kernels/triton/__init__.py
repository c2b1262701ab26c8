"""The operations as Triton kernels (`operations`), and the flags between a stream and the CPU workers (`signal`).

No function synchronises or reads a tensor's values on the host, so that a CUDA graph can capture every call: values
that change from step to step lie in tensors. Each kernel also runs under Triton's interpreter, so the tests need no
GPU.
"""
