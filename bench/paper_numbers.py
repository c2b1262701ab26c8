"""Numbers of ScoutAttention (arXiv 2603.27138) that benches stand beside; sources: bench/simulate_figures.py."""

OVER_STOCK_AT_64K = 5.1
"""Decode throughput of scout over FullKV at 64k tokens, in equal memory."""
OVER_BEST_OFFLOADING = 2.1
"""Over the better of HGCA and InfiniGen, at most (8k to 64k)."""
IDLE = {"scout": 0.06, "hgca": 0.57, "infinigen": 0.61}
"""Share of a decode step in which the GPU waits."""
PRECOMPUTATION = 1.39
"""Computing on the CPU one layer ahead, over neither that nor recall (Figure 12)."""
PERIODIC_RECALL = 1.20
"""Recalling now and then, over the former alone (Figure 12)."""
