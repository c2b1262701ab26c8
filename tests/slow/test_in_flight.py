"""What an engine does while the device is still in the step before: preempt one of its requests (vLLM delivers the
token that the step has for it), compute a batch of nobody."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel here")

from hybrid_backend.batch import captured_step
from tests.support import gpu
from tests.support.far_device import late
from tests.support.harness import PAGE, Engine, config, spec
from tests.support.streams import STREAMS


@pytest.mark.parametrize("method", ["scout", "hgca"])
@pytest.mark.parametrize("ends", ["it goes on", "preempted", "a chunk of its prompt follows"])
def test_a_step_keeps_the_cpu_s_part_of_a_request_that_ends_while_the_device_is_in_it(
    method: str, ends: str, device: torch.device
) -> None:
    keys = (
        {"frames_per_request": 4, "budget_tokens": 64 * PAGE}
        if method == "scout"
        else {"hgca": {"window_tokens": 2 * PAGE}}
    )
    made = Engine(config(method=method, sparse="never", **keys), spec(3), num_pages=64, max_requests=3, device=device)
    made.add("a", 9 * PAGE + 3)
    made.prefill("a")
    made.step({"a": 1})
    made.step({"a": 1})
    model, sequence = made.model, made.sequences["a"]
    with late():
        step, _ = made._begin({"a": 1})
        q = torch.randn(model.num_layers, 1, model.num_heads, model.head_dim, generator=made.rng)
        outs = []
        for layer in range(model.num_layers):
            if layer + 1 < model.num_layers:
                made._look_ahead(layer + 1, step, q, 0.0)
            kv = torch.randn(1, model.num_kv_heads, 2, model.head_dim, generator=made.rng)
            sequence.kv[layer] = sequence.kv[layer] + list(kv)
            here = (q[layer], kv[:, :, 0].contiguous(), kv[:, :, 1].contiguous(), torch.empty_like(q[layer]))
            there = [x.to(made.device) for x in here]
            made.runtime.forward(layer, step, *there)
            outs.append(there[-1])
        made.runtime.end_step(step)
        if ends == "preempted":
            made.runtime.preempt(["a"])
        elif ends == "a chunk of its prompt follows":
            sequence.tokens += 1
            made._begin({"a": 4})
        STREAMS.finish()
        assert made.runtime.failure(step) is None
        worst = [float((out.cpu().double() - made.dense("a", at, q[at])).abs().max()) for at, out in enumerate(outs)]
    assert max(worst) < 1e-4, worst


def test_a_batch_of_nobody_writes_into_no_page_of_the_last_step(device: torch.device) -> None:
    """It is replayed from a graph, which reads the inputs where the last step left them."""
    keys = config(frames_per_request=4, exact_layers=[0], recall={"intervals": 2})
    made = Engine(keys, spec(2), num_pages=64, max_requests=3, device=device)
    made.add("a", 2 * PAGE - 1)
    made.prefill("a")
    made.step({"a": 1})  # fills its second page, which a prefix cache keeps
    page = made.sequences["a"].pages[1]
    made.drop("a")
    before = [kv[page].clone() for kv in made.kv]
    made.runtime.idle()
    model, step = made.model, captured_step(2)  # what a graph of two rows holds
    for layer in range(model.num_layers):
        q = torch.randn(2, model.num_heads, model.head_dim).to(device)
        if layer and made.runtime.wants_lookahead(layer, step):
            made.runtime.lookahead(layer, step, q)
        k, v = (torch.randn(2, model.num_kv_heads, model.head_dim).to(device) for _ in "kv")
        made.runtime.forward(layer, step, q, k, v, torch.empty_like(q))
    if gpu.ON_GPU:
        torch.cuda.synchronize()
    assert all(torch.equal(kv[page], was) for kv, was in zip(made.kv, before, strict=True))
    made.add("b", 3 * PAGE)
    made.prefill("b")
    made.step({"b": 1})  # and what comes next is right
