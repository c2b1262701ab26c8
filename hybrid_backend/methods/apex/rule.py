"""APEX's rule (arXiv 2506.03296), which chooses a strategy for requests whose attention the CPU computes.

T_gl is the time of one layer's matrices, and T_ga the time of the device's attention, while the device's own requests
decode. N_G and N_C are the tokens that device and CPU attend per second. Transfers are left out, as in section 3.2.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from hybrid_backend.hardware.times import LayerTimes


class Verdict(NamedTuple):
    """Choice of Algorithm 1.

    Attributes:
        strategy: the device alone, asymmetric pipelining or asynchronous overlap.
        ratio: N_G / N_C.
        bound: pipelining pays if the ratio is below this number.
    """

    strategy: Literal["gpu", "pipeline", "overlap"]
    ratio: float
    bound: float


def bound(linear: float, attention: float, window: float | None = None) -> float:
    """Return the right side of Inequality (6), the N_G / N_C below which pipelining is faster than the device alone.

    Algorithm 1 pipelines if (N_G T_ga + N_C W) / (2 T_gl + T_ga) > N_G T_ga / (T_gl + T_ga), where W is the time that
    the CPU may compute. Times (2 T_gl + T_ga), less N_G T_ga: N_C W > N_G T_ga T_gl / (T_gl + T_ga). So N_G / N_C <
    W (T_gl + T_ga) / (T_gl T_ga). With decoding requests alone W = 2 T_gl + T_ga (Eq. 4); the product is then
    (2 T_gl^2 + 3 T_gl T_ga + T_ga^2) / (T_gl T_ga) = 2 a + 3 + 1 / a with a = T_gl / T_ga, which is Inequality (6).

    Args:
        linear: T_gl, seconds, more than 0.
        attention: T_ga, seconds. With 0 the device has no decoding request of its own. The device alone then makes no
            token, any token of the CPU is a gain, and the bound is infinite.
        window: W, seconds; None for a step without prompts.
    """
    if not attention:
        return math.inf
    if window is None:
        window = 2 * linear + attention
    return window * (linear + attention) / (linear * attention)


def judge(
    times: LayerTimes,
    device_rows: int,
    device_tokens: int,
    cpu_rows: int,
    prompt_tokens: int = 0,
    prompt_attended: int = 0,
) -> Verdict:
    """Return Algorithm 1's choice for one step.

    Prompt tokens make the CPU's time longer: W = T_gl,pref + T_gl + T_ga,pref. T_gl,pref is the time of the matrices
    over decoding rows and prompt tokens together. T_ga,pref is T_ga plus the prompts' attention, of which only the
    FLOPs are counted (`LayerTimes.prompt_attention`): many prompt tokens share the read of each key, so that they wait
    for arithmetic. N_G, T_gl and T_ga are the values of decoding (section 3.4).

    Args:
        times: times of the machine and the model.
        device_rows: decoding requests that the device attends.
        device_tokens: tokens of these requests together.
        cpu_rows: decoding requests that the CPU attends.
        prompt_tokens: prompt tokens of the step, of all requests together.
        prompt_attended: keys that a prompt token sees, itself included, summed over the prompt tokens. A chunk of n
            tokens that ends at position s of its prompt counts n (2 s - n + 1) / 2.
    """
    linear = times.linear(device_rows)
    attention = times.attention(device_tokens, device_rows) if device_rows else 0.0
    window = times.linear(device_rows + prompt_tokens) if prompt_tokens else linear
    window += linear + attention + times.prompt_attention(prompt_attended)
    ratio, limit = times.device_rate(max(1, device_rows)) / times.cpu_rate, bound(linear, attention, window)
    if not cpu_rows:
        return Verdict("gpu", ratio, limit)
    return Verdict("pipeline" if ratio < limit else "overlap", ratio, limit)


def hidden_tokens(times: LayerTimes, layers: int, device_rows: int, device_tokens: int, *, may_overlap: bool) -> float:
    """Return the tokens of requests on the CPU that delay no request on the device; infinite if there is none on it.

    With overlap the CPU answers one layer of each of its requests while the device passes all L layers, which takes
    L (T_gl + T_ga). In lockstep the CPU answers while the device attends, which takes T_ga. In the paper's pipelining,
    which no engine runs, the CPU has 2 T_gl + T_ga for one layer (section 3.4).

    Args:
        times: times of the machine and the model.
        layers: decoder layers of the model.
        device_rows: decoding requests that the device attends.
        device_tokens: tokens of these requests together.
        may_overlap: rows on the CPU may wait from one step to the next.
    """
    if not device_rows:
        return math.inf
    seconds = times.attention(device_tokens, device_rows)
    if may_overlap:
        seconds = layers * (times.linear(device_rows) + seconds)
    return max(0.0, seconds - times.hardware.cpu_job_overhead_s.value) * times.cpu_rate


def cpu_hides(times: LayerTimes, device_rows: int, device_tokens: int, cpu_tokens: int) -> bool:
    """Tell whether the CPU's answer takes no longer than the device's own attention, so that a layer does not wait.

    The answer decides where Algorithm 1 pipelines. No engine's forward pass holds two batches at once. One batch in
    lockstep does the same without computing the matrices twice, if it need not wait.

    Without a decoding request on the device no request is delayed, and the result is True. The CPU's requests then pass
    L layers in L (T_gl + T_C), where T_C is the time of the CPU's answer. One layer at a time they would need L + 1
    passes of at least max(L T_gl, T_C) each, which is never less.

    Args:
        times: times of the machine and the model.
        device_rows: decoding requests that the device attends.
        device_tokens: tokens of these requests together.
        cpu_tokens: tokens of the requests that the CPU attends, together.
    """
    if not device_rows:
        return True
    return times.cpu_attention(cpu_tokens) <= times.attention(device_tokens, device_rows)
