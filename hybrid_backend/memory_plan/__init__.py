"""What fits the memory of a machine: KV blocks, host pools, frames, whole layers and requests. Imports no engine."""
