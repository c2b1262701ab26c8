"""Memory of a machine shared out: KV blocks, host pools, frames, whole layers and requests. Imports no engine."""
