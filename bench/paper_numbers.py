"""Numbers of ScoutAttention (arXiv 2603.27138) that `bench.gpu_figures` prints beside ours.

Section 4.3 but where a number says otherwise: Qwen3-14B, budget 2048, blocks of 32.
"""

OVER_STOCK_AT_64K = 5.1
"""Decode throughput of scout over FullKV at 64k tokens, on one 80 GB GPU (Figure 8)."""
OVER_BEST_OFFLOADING = 2.1
"""Decode throughput of scout over the better of HGCA and InfiniGen, at most (abstract, Figure 8)."""
IDLE = {"scout": 0.06, "hgca": 0.57, "infinigen": 0.61}
"""Share of a decode step in which the GPU waits for the CPU or for copies, at batch 40 (Figures 3 and 11)."""
PRECOMPUTATION = 1.39
"""Computing on the CPU one layer ahead, over neither that nor recall (Figure 12)."""
PERIODIC_RECALL = 1.20
"""Recalling now and then, over the former alone (Figure 12)."""
