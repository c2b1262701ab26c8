"""What a CUDA graph's replay hands to the backend is the real step, without its padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_backend.batch import captured_step, make_step

pytestmark = pytest.mark.engine
PAGE, ROWS, CAPTURED = 16, 3, 8


@pytest.mark.parametrize("mirrored", [True, False], ids=["lengths on the host", "on the device only"])
def test_a_replays_padded_view_is_the_batch_without_its_padding(mirrored: bool) -> None:
    """The view is SGLang's own, over buffers padded to the captured size."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

    from hybrid_backend.engines.sglang.session import batch_of, decoding, real_rows

    lengths = torch.tensor([33, 16, 5])
    req_to_token = torch.arange(10 * 64).view(10, 64) + PAGE
    batch: Any = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, seq_lens_sum=int(lengths.sum()), seq_lens_cpu=lengths if mirrored else None,
        max_seq_len_host=33, out_cache_loc=torch.tensor([7, 8, 9]), out_cache_loc_virtual=None, kv_loc_plan=None,
        kv_loc_cols=None, max_seq_len_override=None, spec_info=None, lora_ids=None, can_run_decode_cuda_graph=True,
    )  # fmt: skip
    padded = torch.nn.functional.pad(lengths, (0, CAPTURED - ROWS), value=1)
    buffers: Any = SimpleNamespace(
        input_ids=torch.zeros(CAPTURED), positions=torch.zeros(CAPTURED), seq_lens=padded, seq_lens_cpu=padded,
        req_pool_indices=torch.tensor([4, 2, 9] + [0] * (CAPTURED - ROWS)), mamba_track_indices=None,
    )  # fmt: skip
    view = build_replay_fb_view(batch, buffers, CAPTURED, ROWS, CAPTURED, None, 1, ForwardMode.DECODE, False)
    rows = real_rows(view)
    assert rows.tolist() == [4, 2, 9]
    names = ["a", "b", "c"]
    made = make_step(0, batch_of(view, names, decoding(view, names, set()), req_to_token, rows, PAGE), PAGE)
    assert made.decode is not None and made.decode.whole_batch and not made.prefill
    assert made.decode.seq_lens.tolist() == lengths.tolist() and made.decode.num_pages.tolist() == [3, 1, 1]
    expected = (req_to_token[rows][:, :48:PAGE] // PAGE).tolist()
    assert made.decode.page_table[0].tolist() == expected[0]
    assert made.write_pages.tolist() == [0, 0, 0] and made.write_offsets.tolist() == [7, 8, 9]


def test_a_step_to_capture_has_rows_that_own_nothing() -> None:
    step = captured_step(CAPTURED)
    assert step.decode is not None and step.decode.count == CAPTURED and step.is_captured
    assert not step.decode.num_pages.any() and not step.prefill
