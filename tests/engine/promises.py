"""What every server promises, whichever engine and mode it runs."""

from __future__ import annotations

from tests.engine.server import Server

METRICS = {
    "hybrid_selected_tokens_total", "hybrid_cpu_tokens_total", "hybrid_resident_hit_ratio",
    "hybrid_recalled_pages_total", "hybrid_wait_seconds_total", "hybrid_predicted_query_cosine",
    "hybrid_attention_mass_recall", "hybrid_slots_in_use", "hybrid_regions_in_use", "hybrid_host_pool_pages",
}  # fmt: skip
# Gauges that are zero when no request is there.
NOTHING_LEFT = ("hybrid_regions_in_use", "hybrid_slots_in_use", "hybrid_recalls_in_flight")


def a_chat_completion_streams(server: Server) -> None:
    stream = server.client().chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        temperature=0,
        max_tokens=24,
        stream=True,
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len(pieces) > 3, "the answer came in one piece"
    assert "Paris" in "".join(pieces)
