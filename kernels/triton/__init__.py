"""The operations as Triton kernels: `operations` offers them, `signal` is how a stream asks the CPU and waits for it.

Nothing here synchronises or reads a tensor's values on the host, so every call can be captured in a CUDA graph: what
varies from step to step lies in tensors. Each kernel also runs under Triton's interpreter, where the tests need no GPU.
"""
