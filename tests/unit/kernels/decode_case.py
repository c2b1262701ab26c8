"""Sequences that a native decoder decodes, and the checks of one layer against the references."""

from __future__ import annotations

import torch

from hybrid_backend.config import SelectionConfig
from hybrid_backend.kernels import cpu, oracle, reference
from tests.support import cases

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}
"""Relative error of an output in the model's dtype."""


class Case:
    """Sequences whose next token is to be decoded; `tokens` of them are in the cache."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        kv_heads: int,
        group: int,
        dim: int,
        page_size: int,
        rows: int,
        columns: int = 12,
    ) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        pages = rows * columns + 1
        self.layer = torch.randn(pages, kv_heads, 2, page_size, dim, generator=self.rng).to(dtype)
        self.digests = torch.full((pages, kv_heads, 2, dim), 7.0, dtype=dtype)
        self.table = torch.randperm(pages, generator=self.rng)[: rows * columns].view(rows, columns)
        self.seq_lens = torch.randint(1, columns * page_size + 1, (rows,), generator=self.rng)
        self.seq_lens[0] = columns * page_size
        if rows > 1:
            self.seq_lens[1] = page_size * (columns // 2) + 1  # a new page
        self.num_pages = -(-self.seq_lens // page_size)
        self.page_size, self.scale = page_size, dim**-0.5
        for row in range(rows):
            held = int(self.seq_lens[row]) - 1
            if held:
                full = -(-held // page_size)
                tokens = torch.full((full,), page_size)
                tokens[-1] = held - (full - 1) * page_size
                oracle.build_digests(self.layer, self.digests, self.table[row, :full].int(), tokens.int())
        # Beyond the written tokens: NaN.
        for row in range(rows):
            last, offset = divmod(int(self.seq_lens[row]) - 1, page_size)
            self.layer[self.table[row, last], :, :, offset:] = float("nan")
        self.tokens = torch.randperm(rows + 2, generator=self.rng)[:rows]
        heads = kv_heads * group
        fused = torch.randn(rows + 2, (heads + 2 * kv_heads) * dim, generator=self.rng).to(dtype)
        self.q, self.k, self.v = (
            part.view(rows + 2, -1, dim) for part in fused.split([heads * dim, kv_heads * dim, kv_heads * dim], 1)
        )
        self.out = torch.full((rows + 2, heads, dim), 5.0, dtype=dtype)
        self.lse = torch.empty(rows, heads)

    def written(self) -> torch.Tensor:
        layer = self.layer.clone()
        for row, token in enumerate(self.tokens.tolist()):
            last, offset = divmod(int(self.seq_lens[row]) - 1, self.page_size)
            layer[self.table[row, last], :, 0, offset] = self.k[token]
            layer[self.table[row, last], :, 1, offset] = self.v[token]
        return layer

    def check(
        self,
        decoder: cpu.Decoder,
        budgets: torch.Tensor,
        how: SelectionConfig,
        sinks: int,
        recent: int,
        score_q: torch.Tensor | None = None,
        sinks_of_heads: torch.Tensor | None = None,
    ) -> None:
        expected_layer = self.written()
        per_head = how.granularity == "kv_head"
        decoder.begin(
            self.table, self.seq_lens, budgets, sinks=sinks, recent=recent, tokens=self.tokens, per_head=per_head,
            aggregate=how.aggregate,
        )  # fmt: skip
        decoder.layer(0, self.q, self.k, self.v, self.out, score_q=score_q, lse=self.lse)
        assert torch.equal(self.layer.nan_to_num(9), expected_layer.nan_to_num(9))
        for row in range(len(self.tokens)):
            last, offset = divmod(int(self.seq_lens[row]) - 1, self.page_size)
            page = self.table[row, last]
            assert torch.equal(self.digests[page], reference.digest(self.layer[page], offset + 1))
        selected = self._check_selection(decoder, budgets, how, sinks, recent, score_q)
        tail = (self.seq_lens - (self.num_pages - 1) * self.page_size)[:, None, None]
        valid = torch.where(selected == (self.num_pages - 1)[:, None, None], tail, self.page_size)
        valid = valid.masked_fill(selected < 0, 0)
        ids = self.table[:, None].expand(-1, selected.shape[1], -1).gather(2, selected.clamp(min=0))
        ids = ids.masked_fill(selected < 0, -1)
        out, lse = reference.paged_attention(
            self.q[self.tokens], self.layer, ids, valid, self.scale, sinks=sinks_of_heads
        )
        assert cases.relative_error(self.out[self.tokens], out) <= TOLERANCE[self.out.dtype]
        assert torch.allclose(self.lse.double(), lse, atol=1e-3)
        others = torch.ones(len(self.out), dtype=torch.bool)
        others[self.tokens] = False
        assert (self.out[others] == 5).all()

    def scores(self, q: torch.Tensor, how: SelectionConfig) -> torch.Tensor:
        """The oracle's, ``[rows, lists, columns]``."""
        num_pages = self.num_pages.int()
        return oracle.page_scores(
            q, self.digests, self.table.int(), num_pages, torch.zeros_like(num_pages), how.aggregate,
            how.granularity == "kv_head", how.bound, self.scale, self.page_size,
        )  # fmt: skip

    def _check_selection(self, decoder, budgets, how, sinks, recent, score_q) -> torch.Tensor:
        """The decoder's selection, after comparing it by value with torch's. ``[rows, lists, columns]``, padded."""
        q = self.q if score_q is None else score_q
        scores = self.scores(q[self.tokens], how)
        column, count = torch.arange(scores.shape[2]), self.num_pages[:, None, None]
        forced = scores.nan_to_num(0).masked_fill((column < sinks) | (column >= count - recent), float("inf"))
        forced = forced.masked_fill(column >= count, float("-inf"))
        lists = scores.shape[1]
        chosen = torch.full((len(self.tokens), lists, self.table.shape[1]), -1)
        for row in range(len(self.tokens)):
            pages, budget = int(self.num_pages[row]), int(budgets[row])
            dense = budget < 0 or budget >= pages
            for line in range(lists):
                mine = decoder.selected(row, 0 if dense else line).long()
                assert pages - 1 in mine.tolist()
                if dense:
                    assert mine.tolist() == list(range(pages))
                else:
                    count = max(budget, min(pages, sinks + recent))
                    best = forced[row, line].topk(count).values.sort().values
                    atol = 1e-5 if how.aggregate == "softmax" else 1e-2
                    assert torch.allclose(forced[row, line, mine].sort().values, best, atol=atol)
                chosen[row, line, : len(mine)] = mine
        return chosen
