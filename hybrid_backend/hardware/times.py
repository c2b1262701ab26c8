"""How long the parts of one decoder layer take by themselves: bytes and FLOPs against a hardware profile's rates."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_backend.hardware.spec import Hardware
from hybrid_backend.model import ModelShape


@dataclass(frozen=True)
class LayerTimes:
    """One decoder layer on one machine. Times in seconds, sizes in bytes, rates in tokens per second.

    ``weight_bytes``: all matrices of the layer; ``dtype_bytes``: of one element of them; ``token_bytes``: K and V of
    one token; ``attention_flops_per_pair``: of one query token's attention to one key, all heads together.
    """

    hardware: Hardware
    weight_bytes: int
    dtype_bytes: int
    token_bytes: int
    attention_flops_per_pair: int

    @classmethod
    def of(cls, hardware: Hardware, shape: ModelShape) -> LayerTimes:
        """Of a layer of that model, whole (no tensor parallelism)."""
        pair = 4 * shape.heads * shape.head_dim  # a product and a sum for Q.K, the same for the weighted sum of V
        return cls(hardware, shape.layer_weight_bytes, shape.dtype_bytes, shape.token_bytes, pair)

    # --- device ---

    def matrices(self, weight_bytes: float, rows: int, passed: float | None = None) -> float:
        """Matrices of that size times the rows: the slower of reading them and of multiplying; or as measured.
        ``passed``: bytes of those that one row is multiplied by, where that is not all of them (experts)."""
        if self.hardware.linear_bytes_per_s is not None:
            return weight_bytes / self.hardware.linear_bytes_per_s.at(rows)
        flops = 2.0 * (weight_bytes if passed is None else passed) / self.dtype_bytes * rows
        return max(weight_bytes / self.hardware.hbm_achieved, flops / self.hardware.flops_achieved)

    def linear(self, rows: int) -> float:
        """Everything of the layer but its attention: all matrices, and the small kernels."""
        return self.matrices(self.weight_bytes, rows) + self.hardware.layer_overhead_s.value

    def reading(self, kv_bytes: float, rows: int) -> float:
        """Attention of ``rows`` decoding rows to that much K and V in the device's memory, by our kernels."""
        curve = self.hardware.device_attention_bytes_per_s
        return kv_bytes / (self.hardware.hbm_achieved if curve is None else curve.at(rows))

    def attention(self, tokens: float, rows: int) -> float:
        """The same by tokens: of all rows together."""
        return self.reading(tokens * self.token_bytes, rows)

    def prompt_attention(self, pairs: float) -> float:
        """Of prompt tokens: as many query tokens share each key, so the multipliers are what it waits for. ``pairs``:
        keys that each prompt token sees, summed over the prompt tokens."""
        return pairs * self.attention_flops_per_pair / self.hardware.flops_achieved

    def device_rate(self, rows: int) -> float:
        """Tokens that the device attends per second while ``rows`` rows decode (APEX's N_G)."""
        return 1.0 / self.attention(1.0, rows)

    # --- workers ---

    def cpu_reading(self, kv_bytes: float, copied: float = 0.0) -> float:
        """Attention of the CPU workers to that much K and V in host memory, from the request to the answer, while
        ``copied`` bytes leave the same memory for the device."""
        if not kv_bytes:
            return 0.0
        workers = kv_bytes / self.hardware.cpu_attention_achieved
        memory = (kv_bytes + copied) / self.hardware.host_read_achieved
        return max(workers, memory) + self.hardware.cpu_job_overhead_s.value

    def cpu_attention(self, tokens: float) -> float:
        """The same by tokens, of all rows together, with no copies beside it."""
        return self.cpu_reading(tokens * self.token_bytes)

    @property
    def cpu_rate(self) -> float:
        """Tokens that the workers attend per second once they are at it (APEX's N_C)."""
        return min(self.hardware.cpu_attention_achieved, self.hardware.host_read_achieved) / self.token_bytes
