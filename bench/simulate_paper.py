"""ScoutAttention's numbers (arXiv 2603.27138) and the simulation of them, for bench.simulate_figures.

Every number that the paper's text states of speed or memory, with the workload as the text names it. What the text
leaves open is assumed, and `Claim.assumed` says what; what disagrees keeps its error, and `Claim.why` says where that
comes from, as far as it is known. No parameter differs from one number to another, but for the model and the budget
that the paper names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from bench import paper_numbers
from bench.model_configs import SHAPES
from hybrid_backend.config import HybridConfig
from hybrid_backend.hardware import Curve, Hardware, find_hardware
from hybrid_backend.model import ModelShape, shape_from_config
from hybrid_backend.tools.plan.simulate import StepTime, decode_step
from hybrid_backend.tools.plan.simulate.costs import Costs
from hybrid_backend.tools.plan.simulate.decode import INFINIGEN_SHARE, SCOUT_SHARE
from hybrid_backend.tools.plan.simulate.overheads import BARE, ENGINE, Launches

QWEN3_14B = shape_from_config(SHAPES["qwen3-14b"], "qwen3-14b")
QWEN3_32B = shape_from_config(SHAPES["qwen3-32b"], "qwen3-32b")
BUDGET, PAGE = 2048, 32
CONTEXTS = (8192, 16384, 32768, 65536)
"""Figure 8's lengths, as far as the text names them: 8k, larger ones, 64k."""
BATCH = 40
"""Of the idle shares (section 2.3)."""
LENGTH = 32768
"""Of Figure 9; assumed where the text names no length."""
USABLE = 0.88 * 80 * 2**30
"""Bytes of an 80 GB GPU that weights and KV may take: SGLang's share."""
TOLERANCE = 0.15
"""A number further off than this needs a reason."""
CPU_RATE = 100e9
"""Section 3.2: "A 36-core CPU can achieve an attention computation throughput of approximately 100 GB/s"."""
OVERHEADS = replace(
    BARE,
    launches=dict.fromkeys(("scout", "infinigen"), Launches(ENGINE + 10, ENGINE)),
    kernel_s=2e-6,
    shares_dram=True,
    partial_bytes=4.0,
)
"""The paper's step is not ours and what it launches is not told: ten small kernels of 2 us a layer stand for it."""
LINK = ((4096.0, 0.8e9), (131072.0, 15e9))
"""Section 2.3, Figure 2: 800 MB/s at 4 KB (a token), about 15 GB/s at 128 KB (32 tokens), PCIe 4 x16."""


@dataclass(frozen=True)
class Claim:
    """A published number and the simulation of it.

    ``assumed`` is what the paper leaves open, empty if it says all.
    """

    source: str
    what: str
    workload: str
    assumed: str
    paper: float
    simulated: float
    why: str = ""

    @property
    def error(self) -> float:
        """Relative error of the simulation."""
        return self.simulated / self.paper - 1.0

    @property
    def agrees(self) -> bool:
        return abs(self.error) <= TOLERANCE


@dataclass(frozen=True)
class Statement:
    """A statement of the paper in words, and whether the simulation agrees."""

    source: str
    what: str
    assumed: str
    simulated: str
    holds: bool
    why: str = ""


@dataclass(frozen=True)
class Otherwise:
    """A claim's value under another reading of the text; ``paper`` is the published value."""

    what: str
    instead: str
    paper: float
    simulated: float


def paper_machine() -> Hardware:
    """Return an A100 80GB PCIe (1.9 TB/s, PCIe 4 x16) with the paper's own rates of CPU and link."""
    return find_hardware("a100-80").replace(
        name="ScoutAttention's machine",
        cores=36,
        cpu_attention_bytes_per_s=Curve(points=((36.0, CPU_RATE),), source="ScoutAttention, section 3.2"),
        host_device_bytes_per_s=Curve(points=LINK, source="ScoutAttention, section 2.3 and Figure 2"),
    )


def window_of(context: int) -> int:
    """Return HGCA's tokens on the GPU: "a sliding window of 25% tokens" (section 2.3)."""
    return context // 4


def paper_config(window: int = BUDGET, budget: int = BUDGET, page: int = PAGE) -> HybridConfig:
    """Return the paper's configuration: blocks of 32, budget 2,048 (section 4.3), every layer sparse, Quest's digests.

    Recall comes every 8.7 steps on average (section 3.4).
    """
    return HybridConfig.model_validate(
        {
            "page_size": page, "budget_tokens": budget, "hgca": {"window_tokens": window},
            "recall": {"intervals": 9}, "selection": {"digest": "minmax"},
        }
    )  # fmt: skip


@lru_cache
def step(
    method: str,
    context: int,
    batch: int,
    *,
    lookahead: bool = True,
    recall: bool = True,
    share: float | None = None,
    window: int | None = None,
    page: int = PAGE,
) -> StepTime:
    """Return a step of Qwen3-14B; with HGCA a quarter of the tokens is on the GPU, and the budget on the CPU."""
    window = window_of(context) if window is None else window
    if method == "hgca" and share is None:
        share = BUDGET / (BUDGET + window)
    return decode_step(
        paper_machine(), QWEN3_14B, paper_config(window, page=page), method, context, batch,
        cpu_share=share, lookahead=lookahead, recall=recall, overheads=OVERHEADS,
    )  # fmt: skip


def idle(at: StepTime) -> float:
    """Return the percent of a step in which the GPU stalls for the CPU or for copies (Figure 11's "idle").

    The step's own overhead is not part of it.
    """
    return 100 * (at.device_idle - paper_machine().step_overhead_s.value) / at.seconds


def fits(method: str, context: int, shape: ModelShape = QWEN3_14B, budget: int = BUDGET, page: int = PAGE) -> int:
    """Return the sequences that fit the GPU beside the weights: all tokens, HGCA's window, or budget and digests."""
    sparse = budget + math.ceil(context / page)  # a digest (minimum and maximum of K) is as large as a token's K and V
    tokens = {"stock": context, "hgca": window_of(context)}.get(method, sparse)
    return int((USABLE - shape.weight_bytes) // (tokens * shape.token_bytes * shape.layers))


def growth(method: str, batch: int) -> float:
    """Return the tokens per second at twice the batch over those at the batch, at Figure 9's 32k."""
    return step(method, LENGTH, 2 * batch).tokens_per_s / step(method, LENGTH, batch).tokens_per_s


def figure_8(method: str, context: int) -> float:
    """Return tokens per second; batches are not published: 40 sequences, or as many as fit."""
    return step(method, context, min(BATCH, fits(method, context))).tokens_per_s


def over_best(context: int) -> float:
    """Return Scout over the better of HGCA and InfiniGen, each with 40 sequences."""
    return min(step(m, context, BATCH).seconds for m in ("hgca", "infinigen")) / step("scout", context, BATCH).seconds


def ablation(context: int = LENGTH, batch: int = BATCH, without_recall: float | None = None) -> tuple[float, float]:
    """Return the speedup of pre-computation over neither, and of recall in addition.

    ``without_recall`` is the CPU's share without recall.
    """
    neither = step("scout", context, batch, lookahead=False, recall=False, share=without_recall)
    ahead = step("scout", context, batch, recall=False, share=without_recall)
    return neither.seconds / ahead.seconds, ahead.seconds / step("scout", context, batch).seconds


def layer_of_32b(batch: int) -> tuple[float, float]:
    """Return the microseconds of Qwen3-32B's layer and of its GPU attention alone, at budget 4,096 and 32k tokens."""
    costs = Costs(paper_machine(), QWEN3_32B, paper_config(budget=4096), LENGTH, batch)
    attention = costs.attention(costs.kv((1 - SCOUT_SHARE) * 4096))
    others = costs.projections + costs.prediction + costs.scoring(costs.digest_bytes) + costs.rest
    return 1e6 * (attention + others), 1e6 * attention


def claims() -> list[Claim]:
    """Return every number of the text that is not an input here."""
    machine = paper_machine()
    infinigen_assumed = (
        f"{100 * INFINIGEN_SHARE:.1f} % of the budget copied (measured here; text: below 15 %), blocks of 32"
    )
    request = LENGTH * QWEN3_32B.token_bytes * QWEN3_32B.layers
    batch_32b = fits("scout", LENGTH, QWEN3_32B, budget=4096)
    layer, attention = layer_of_32b(batch_32b)
    on_32b = "Qwen3-32B, budget 4k, 80 GB GPU"
    all_that_fit = f"batch {batch_32b}: what bf16 weights leave room for; 32k tokens"
    at_40 = "Qwen3-14B, budget 2048, batch 40"
    at_32k = "Qwen3-14B, budget 2048, 32k tokens"
    scout, hgca, infinigen = (step(m, LENGTH, BATCH) for m in ("scout", "hgca", "infinigen"))
    over_stock = step("scout", 65536, BATCH).tokens_per_s / step("stock", 65536, fits("stock", 65536)).tokens_per_s
    ahead, recalled = ablation()
    hgca_assumed = "25 % of the context attended on the GPU, 2048 tokens on the CPU"
    less_on_the_cpu = "57 % and 1.31 together would be 880 tokens on the CPU, 3,072 on the GPU: less than the text says"
    ablated = "32k tokens, batch 40; CPU's share without recall: 16 % (twice the 8.2 %, as measured here)"
    paper_idle = {method: 100 * share for method, share in paper_numbers.IDLE.items()}
    return [
        Claim("1", "KV cache of a request, GB", "Qwen3-32B, 32k tokens", "", 8, request / 2**30),
        Claim("1", "largest batch without offloading", "Qwen3-32B, 32k tokens, 80 GB GPU", "88 % of the memory usable",
              1, fits("stock", LENGTH, QWEN3_32B)),
        Claim("2.3", "K and V of a token in a layer, KB", "", "Qwen3-14B", 4, QWEN3_14B.token_bytes / 1024),
        Claim("2.3", "a page of 32 tokens, KB", "", "Qwen3-14B", 128, QWEN3_14B.page_bytes(PAGE) / 1024),
        Claim("1, 2.3", "GPU attention over CPU attention", "1.9 TB/s HBM; 36 cores, 100 GB/s",
              "GPU at 80 % of its peak", 20, machine.hbm_achieved / CPU_RATE,
              "the paper's own peak of 1.9 TB/s over 100 GB/s is 19; kernels here reach 80 % of the peak"),
        Claim("3.3", "a layer, us", on_32b, all_that_fit, paper_numbers.LAYER_US, layer,
              "two errors that cancel in part: without the attention the paper has 600 us and the simulation "
              f"{layer - attention:.0f}; for the attention see the next line"),
        Claim("3.3", "its attention alone, us", on_32b, all_that_fit, paper_numbers.ATTENTION_US, attention,
              "at this bandwidth 300 us are 30 sequences, whose budgets (32 GB) do not fit beside 65 GB of weights: "
              "either another memory, or attention far from the bandwidth"),
        Claim("4.3, Fig. 8", "scout over FullKV", "Qwen3-14B, budget 2048, 64k tokens",
              f"batch 40; FullKV: {fits('stock', 65536)}, what fits", paper_numbers.OVER_STOCK_AT_64K, over_stock,
              "both batches are unknown. 5.1 would be batch 11 here, where InfiniGen waits for 4 % of a step and scout "
              "could not be 2.1 times as fast: a FullKV with more than four sequences of 64k would explain both"),
        Claim("abstract, 4.3", "scout over the better of HGCA and InfiniGen, at most", "Qwen3-14B, budget 2048",
              f"batch 40, 8k to 64k; {infinigen_assumed}", paper_numbers.OVER_BEST_OFFLOADING,
              max(over_best(context) for context in CONTEXTS),
              f"the most is at 8k; at 64k it is {over_best(65536):.2f}. Idle shares of 61 % and 6 % alone make "
              "(1 - 0.06) / (1 - 0.61) = 2.4, if both are equally busy otherwise"),
        Claim("4.3, Fig. 9", "scout, batch 32 over 16", at_32k, "", paper_numbers.GROWTH["scout", 16],
              growth("scout", 16)),
        Claim("4.3, Fig. 9", "scout, batch 64 over 32", at_32k, "", paper_numbers.GROWTH["scout", 32],
              growth("scout", 32)),
        Claim("4.3, Fig. 9", "HGCA, batch 32 over 16", at_32k, hgca_assumed, paper_numbers.GROWTH["hgca", 16],
              growth("hgca", 16), less_on_the_cpu),
        Claim("4.3, Fig. 9", "InfiniGen, batch 32 over 16", at_32k, infinigen_assumed,
              paper_numbers.GROWTH["infinigen", 16], growth("infinigen", 16),
              "copies are all that is waited for from batch 16 on; in the paper they grow as if they were not hidden "
              "behind the matrices"),
        Claim("4.3, Fig. 11", "GPU idle, scout, %", "Qwen3-14B, budget 2048",
              "batch 40, as section 2.3 has it for the other two; 32k tokens", paper_idle["scout"], idle(scout),
              "the workers answer in time in every layer but the first: a mean share and one rate know no sequence, "
              "thread group or layer that is slower than the others"),
        Claim("2.3, Fig. 3, 11", "GPU idle, HGCA, %", at_40,
              f"32k tokens (whose windows fit {fits('hgca', LENGTH)} times, not 40); {hgca_assumed}",
              paper_idle["hgca"], idle(hgca), less_on_the_cpu),
        Claim("2.3, Fig. 3, 11", "GPU idle, InfiniGen, %", at_40, f"32k tokens; {infinigen_assumed}",
              paper_idle["infinigen"], idle(infinigen)),
        Claim("4.3, Fig. 12", "pre-computation (PC) over neither", "Qwen3-14B, budget 2048", ablated,
              paper_numbers.PRECOMPUTATION, ahead),
        Claim("4.3, Fig. 12", "periodic recall (PR) in addition", "Qwen3-14B, budget 2048", ablated,
              paper_numbers.PERIODIC_RECALL, recalled,
              "a layer hides 16 % at 100 GB/s, so recall has nothing to save. The share without recall stands in "
              "Figure 6a only (Qwen3-8B); 1.20 would be 27 %"),
    ]  # fmt: skip


def statements() -> list[Statement]:
    """Return the orders and bounds that the text states."""
    loads = "at most 40 sequences, or what fits"
    others = ("hgca", "infinigen", "stock")
    over_stock = [figure_8("scout", n) / figure_8("stock", n) for n in CONTEXTS]
    short, long = (
        {m: figure_8(m, n) / figure_8("stock", n) for m in ("hgca", "infinigen")} for n in (CONTEXTS[0], CONTEXTS[-1])
    )
    gains = {m: growth(m, 16) for m in ("scout", "hgca", "infinigen")}
    stalls = {n: [idle(step(m, n, BATCH)) for m in ("infinigen", "hgca", "scout")] for n in CONTEXTS}
    pages = {
        page: step("scout", LENGTH, fits("scout", LENGTH, page=page), page=page).tokens_per_s for page in (16, 32, 64)
    }
    quickest = min(step("scout", LENGTH, batch).seconds for batch in (16, 32, 64))

    def ratios(by: dict[str, float]) -> str:
        return ", ".join(f"{key} {value:.2f}" for key, value in by.items())

    return [
        Statement("4.3, Fig. 8", "scout is the fastest at every length", loads,
                  f"over FullKV {', '.join(f'{x:.1f}' for x in over_stock)}",
                  all(figure_8("scout", n) > figure_8(m, n) for n in CONTEXTS for m in others)),
        Statement("4.3, Fig. 8", "its speedup over FullKV grows with the length", loads, "as above",
                  over_stock == sorted(over_stock)),
        Statement("4.3, Fig. 8", "HGCA and InfiniGen are slower than FullKV at 8k", loads,
                  f"over FullKV: {ratios(short)}", max(short.values()) < 1),
        Statement("4.3, Fig. 8", "and faster at larger lengths", f"64k; {loads}", f"over FullKV: {ratios(long)}",
                  min(long.values()) > 1),
        Statement("4.3, Fig. 9", "scout grows most with the batch, then HGCA, then InfiniGen", "",
                  f"16 to 32: {ratios(gains)}", gains["scout"] > gains["hgca"] > gains["infinigen"]),
        Statement("4.3, Fig. 10", "larger blocks are faster: smaller digests, larger batches", "32k; 16, 32, 64 tokens",
                  ", ".join(f"{page}: {rate:.0f} tokens/s" for page, rate in pages.items()),
                  pages[16] < pages[32] < pages[64]),
        Statement("4.3, Fig. 11", "InfiniGen waits longest, then HGCA, then scout", "32k tokens",
                  "; ".join(f"{n // 1024}k: {a:.0f}, {b:.0f}, {c:.1f} %" for n, (a, b, c) in stalls.items()),
                  stalls[LENGTH] == sorted(stalls[LENGTH], reverse=True),
                  "HGCA's 2048 tokens take the CPU 3.4 ms whatever the length, while its window on the GPU grows with "
                  "it: only at 64k it waits less than InfiniGen"),
        Statement("3.4", "a recall has more than 20 ms, one decode step", "32k tokens, batch 16 to 64",
                  f"at least {1e3 * quickest:.0f} ms", quickest > 0.020),
    ]  # fmt: skip


def otherwise() -> list[Otherwise]:
    """Return other readings of what the text leaves open."""
    shares = paper_numbers.IDLE
    split = step("hgca", LENGTH, BATCH, window=512, share=0.75)
    by_token = decode_step(
        paper_machine().replace(host_device_bytes_per_s=Curve(points=LINK[:1], source="Figure 2")),
        QWEN3_14B, paper_config(), "infinigen", LENGTH, BATCH,
    )  # fmt: skip
    general = decode_step(find_hardware("a100-80"), QWEN3_14B, paper_config(), "infinigen", LENGTH, BATCH)
    few = {batch: step("hgca", LENGTH, batch, window=3072, share=880 / 3952) for batch in (16, 32, BATCH)}
    ahead, recalled = ablation(without_recall=0.27)
    layer, attention = layer_of_32b(30)
    stock = step("stock", 65536, fits("stock", 65536)).tokens_per_s
    rows = [
        Otherwise("GPU idle, scout, %", "the step's own overhead (2 ms) counted as idle", 100 * shares["scout"],
                  100 * step("scout", LENGTH, BATCH).idle_share),
        Otherwise("GPU idle, HGCA, %", "the budget split 25:75, so 512 tokens on the GPU and 1536 on the CPU",
                  100 * shares["hgca"], idle(split)),
        Otherwise("GPU idle, HGCA, %", "880 tokens on the CPU beside 3,072 (solved for)", 100 * shares["hgca"],
                  idle(few[BATCH])),
        Otherwise("HGCA, batch 32 over 16", "the same", paper_numbers.GROWTH["hgca", 16],
                  few[32].tokens_per_s / few[16].tokens_per_s),
        Otherwise("GPU idle, InfiniGen, %", "15 % of the budget copied, the text's bound", 100 * shares["infinigen"],
                  idle(step("infinigen", LENGTH, BATCH, share=0.15))),
        Otherwise("GPU idle, InfiniGen, %", "copied token by token, at 800 MB/s", 100 * shares["infinigen"],
                  idle(by_token)),
        Otherwise("GPU idle, InfiniGen, %", "the general figures of a100-80 in place of the paper's 15 GB/s",
                  100 * shares["infinigen"], idle(general)),
        Otherwise("PC over neither", "27 % on the CPU without recall (solved for)", paper_numbers.PRECOMPUTATION,
                  ahead),
        Otherwise("PR in addition", "the same", paper_numbers.PERIODIC_RECALL, recalled),
        Otherwise("Qwen3-32B, a layer, us", "batch 30, were there memory for it", paper_numbers.LAYER_US, layer),
        Otherwise("its attention alone, us", "the same", paper_numbers.ATTENTION_US, attention),
    ]  # fmt: skip
    return rows + [
        Otherwise("scout over FullKV, 64k", f"batch {batch}", paper_numbers.OVER_STOCK_AT_64K,
                  step("scout", 65536, batch).tokens_per_s / stock)
        for batch in (8, 11, 16, 32, 64)
    ]  # fmt: skip


def unchecked() -> list[tuple[str, str]]:
    """Return published numbers that could not be checked, with the reasons."""
    return [
        ("bars and points of Figures 8 to 12 beyond the above", "in the drawings only, not in the text"),
        ("800 MB/s, 15 GB/s, 100 GB/s, 1.9 TB/s, 36 cores", "inputs: the machine"),
        ("8.2 % of the budget on the CPU, recall every 8.7 steps", "inputs; what they are here: docs/measurements.md"),
        ("accuracy, Table 1 and Figure 7", "no question of time: docs/accuracy.md"),
    ]
