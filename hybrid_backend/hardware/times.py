"""Times of a decoder layer's operations: bytes and FLOPs against the rates of a hardware profile."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_backend.hardware.spec import Hardware
from hybrid_backend.model import ModelShape


@dataclass(frozen=True)
class LayerTimes:
    """A decoder layer on a machine. Times are in seconds, sizes in bytes, rates in tokens per second.

    Attributes:
        weight_bytes: all matrices of the layer.
        dtype_bytes: one element of the matrices.
        token_bytes: K and V of one token.
        attention_flops_per_pair: attention of one query token to one key, all heads together.
    """

    hardware: Hardware
    weight_bytes: int
    dtype_bytes: int
    token_bytes: int
    attention_flops_per_pair: int

    @classmethod
    def of(cls, hardware: Hardware, shape: ModelShape) -> LayerTimes:
        """Return the times for one layer of a model, without tensor parallelism."""
        pair = 4 * shape.heads * shape.head_dim  # A product and a sum for Q.K, and the same for the weighted sum of V.
        return cls(hardware, shape.layer_weight_bytes, shape.dtype_bytes, shape.token_bytes, pair)

    # --- device ---

    def matrices(self, weight_bytes: float, rows: int, passed: float | None = None) -> float:
        """Return the time to multiply matrices by ``rows`` rows: measured, or the slower of reading and multiplying.

        Args:
            weight_bytes: the matrices that are read.
            rows: sequences.
            passed: the matrices that one row is multiplied by, if fewer (experts).
        """
        if self.hardware.linear_bytes_per_s is not None:
            return weight_bytes / self.hardware.linear_bytes_per_s.at(rows)
        flops = 2.0 * (weight_bytes if passed is None else passed) / self.dtype_bytes * rows
        return max(weight_bytes / self.hardware.hbm_achieved, flops / self.hardware.flops_achieved)

    def linear(self, rows: int) -> float:
        """Return the time of the layer without its attention: all matrices and the small kernels."""
        return self.matrices(self.weight_bytes, rows) + self.hardware.layer_overhead_s.value

    def reading(self, kv_bytes: float, rows: int) -> float:
        """Return the time of our kernels to attend ``kv_bytes`` in the device's memory for ``rows`` decode rows."""
        curve = self.hardware.device_attention_bytes_per_s
        return kv_bytes / (self.hardware.hbm_achieved if curve is None else curve.at(rows))

    def attention(self, tokens: float, rows: int) -> float:
        """Return the time of our kernels to attend ``tokens`` resident tokens, summed over ``rows`` decode rows."""
        return self.reading(tokens * self.token_bytes, rows)

    def prompt_attention(self, pairs: float) -> float:
        """Return the time of prompt attention, which is bound by FLOPs, because many query tokens share each key.

        Args:
            pairs: keys that a prompt token sees, summed over the prompt tokens.
        """
        return pairs * self.attention_flops_per_pair / self.hardware.flops_achieved

    def device_rate(self, rows: int) -> float:
        """Return the tokens that the device attends per second while ``rows`` rows decode (APEX's N_G)."""
        return 1.0 / self.attention(1.0, rows)

    # --- workers ---

    def cpu_reading(self, kv_bytes: float, copied: float = 0.0) -> float:
        """Return the time from a request to the CPU workers to their answer.

        Args:
            kv_bytes: K and V to attend in host memory.
            copied: bytes that leave the same memory for the device in that time.
        """
        if not kv_bytes:
            return 0.0
        workers = kv_bytes / self.hardware.cpu_attention_achieved
        memory = (kv_bytes + copied) / self.hardware.host_read_achieved
        return max(workers, memory) + self.hardware.cpu_job_overhead_s.value

    def cpu_attention(self, tokens: float) -> float:
        """Return the time of the CPU workers to attend ``tokens`` tokens, summed over all rows, without copies."""
        return self.cpu_reading(tokens * self.token_bytes)

    @property
    def cpu_rate(self) -> float:
        """Tokens that the workers attend per second, without the job's overhead (APEX's N_C)."""
        return min(self.hardware.cpu_attention_achieved, self.hardware.host_read_achieved) / self.token_bytes
