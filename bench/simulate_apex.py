"""APEX's numbers (arXiv 2506.03296) and the simulation of them, for bench.simulate_figures.

The paper prints few loads: batches, the share of prompts and NEO's choices are not in its text. What is compared is
decoding alone, at the length of section 5.4, with a CPU at a tenth of the GPU's attention (section 2.4: "typically less
than 10%"). As many CPU requests as make the most tokens per second. No parameter was fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from bench.model_configs import SHAPES
from bench.simulate_clo import LLAMA3_8B
from bench.simulate_paper import Claim, Otherwise, Statement
from hybrid_backend.config import HybridConfig
from hybrid_backend.hardware import Curve, Hardware, find_hardware
from hybrid_backend.hardware.times import LayerTimes
from hybrid_backend.methods.apex.rule import Verdict, bound, judge
from hybrid_backend.model import ModelShape, shape_from_config
from hybrid_backend.tools.plan.simulate import StepTime, decode_step

LLAMA2_7B = shape_from_config(SHAPES["llama2-7b"], "llama2-7b")
TENTH = 0.1
"""N_C / N_G: "less than 10%" (sections 2.4 and 3.2); also the named a10's, by its host's memory (0.102)."""
LENGTH = 1300
"""Tokens of a request on average while it decodes: 1,000 of prompt and half of 600 of output (section 5.4)."""
USABLE = 0.88
"""Share of the GPU's memory for weights and KV, as in `bench.simulate_paper`."""
OVER_NEO = 1.37
"""Section 5.4: outputs of more than 500 tokens, A10, Llama-3.1-8B."""
T4_OVER_VLLM = (1.84, 1.96)
"""Abstract, LLaMa-2-7B."""
CONFIG = HybridConfig.model_validate({"recall": {"intervals": 1}})
"""Nothing is recalled: every step is like the next."""
MOST, STRIDE = 1024, 16
"""CPU requests of the search, at most and at first."""


@dataclass(frozen=True)
class Case:
    """A GPU and a CPU that attends ``ratio`` of the GPU's tokens, with requests that decode at ``context`` tokens."""

    gpu: str
    shape: ModelShape
    context: int
    ratio: float = TENTH

    @cached_property
    def machine(self) -> Hardware:
        gpu = find_hardware(self.gpu)
        rate, source = self.ratio * gpu.hbm_achieved, f"APEX, sections 2.4 and 3.2: {self.ratio:.0%} of the GPU's rate"
        return gpu.replace(
            name=f"APEX's {self.gpu}",
            cpu_attention_bytes_per_s=Curve(points=((1.0, rate),), source=source),
            host_read_bytes_per_s=Curve(points=((1.0, rate / 0.8),), source="as CPU attention at 80 % of it"),
        )

    @property
    def times(self) -> LayerTimes:
        return LayerTimes.of(self.machine, self.shape)

    def room(self, usable: float) -> float:
        """Return the tokens whose K and V fit beside the weights in that share of the GPU's memory."""
        free = usable * self.machine.device_memory_bytes.value - self.shape.weight_bytes
        return free / (self.shape.token_bytes * self.shape.layers)

    @property
    def rows(self) -> int:
        """Return the number of requests that fit the GPU."""
        return int(self.room(USABLE) // self.context)

    @property
    def verdict(self) -> Verdict:
        """Return whether inequality (6) holds."""
        return judge(self.times, self.rows, self.rows * self.context, 1)


A10 = Case("a10", LLAMA3_8B, LENGTH)
T4 = tuple(Case("t4", LLAMA2_7B, context) for context in (300, 500, 1000))
"""The text names no length."""


@lru_cache
def step(case: Case, strategy: str, cpu_rows: int) -> StepTime:
    """Return a step with as many requests on the GPU as fit, and ``cpu_rows`` on the CPU."""
    batch = case.rows + cpu_rows
    return decode_step(case.machine, case.shape, CONFIG, f"apex_{strategy}", case.context, batch, cpu_rows=cpu_rows)


@lru_cache
def best(case: Case, strategy: str) -> StepTime:
    """Return the step with the number of CPU requests that makes the most tokens per second.

    The CPU answers them within an iteration: more requests would make no more tokens, and each would wait longer.
    """

    def rate(cpu_rows: int) -> float:
        at = step(case, strategy, cpu_rows)
        return at.tokens_per_s if at.cpu_token_steps <= case.shape.layers + 1 else 0.0

    near = max(range(1, MOST, STRIDE), key=rate)
    return step(case, strategy, max(range(max(1, near - STRIDE), near + STRIDE + 1), key=rate))


def gain(case: Case, strategy: str) -> float:
    """Return the best tokens per second over those of the GPU alone."""
    return best(case, strategy).tokens_per_s / step(case, "gpu", 0).tokens_per_s


def mean_latency(at: StepTime) -> float:
    """Return the mean seconds per token over requests that end: those of the CPU take longer and end less often."""
    there = at.cpu_rows / at.cpu_token_steps
    here = at.batch - at.cpu_rows
    return at.seconds * (here + there * at.cpu_token_steps) / (here + there)


def claims() -> list[Claim]:
    """Return inequality (6) and the one throughput whose load can be told from the text."""
    pipelined = gain(A10, "pipeline")
    return [
        Claim("3.2", "largest N_G / N_C at which pipelining pays", "T_ga / T_gl from 0.5 to 1.5",
              "T_ga / T_gl 0.5, where the bound is the largest of that range", 7.5, bound(2.0, 1.0)),
        Claim("3.2", "smallest N_C that pays, % of N_G", "T_ga / T_gl from 0.5 to 1.5", "as above", 13,
              100 / bound(2.0, 1.0)),
        Claim("5.4, Fig. 7", "APEX over NEO, long outputs", "A10, Llama-3.1-8B; 1,000 tokens in, 600 out",
              f"decoding alone at {LENGTH:,} tokens; N_C / N_G {TENTH}; {A10.rows} requests on the GPU (what fits), "
              f"{best(A10, 'overlap').cpu_rows} on the CPU (best); NEO: the GPU alone, since "
              f"pipelining makes {pipelined:.2f} of it", OVER_NEO, gain(A10, "overlap") / max(1.0, pipelined)),
    ]  # fmt: skip


def statements() -> list[Statement]:
    """Return the text's statements on pipelining, overlap, latency and the T4."""
    pipelined, overlap = best(A10, "pipeline"), best(A10, "overlap")
    waits = 100 * (overlap.device_idle - A10.machine.step_overhead_s.value) / overlap.seconds
    more = gain(A10, "overlap") - 1
    latency, overlap_latency = (1e3 * mean_latency(at) for at in (pipelined, overlap))
    full = int(T4[0].room(1.0))
    t4 = judge(T4[0].times, T4[0].rows, full, 1)
    fit = ", ".join(f"{case.rows} of {case.context:,}" for case in T4)
    t4_gains = [gain(case, "pipeline") for case in T4]
    return [
        Statement("2.4", "pipelining is no gain while only decoding", f"A10 as above, {pipelined.cpu_rows} on the CPU",
                  f"{gain(A10, 'pipeline'):.2f} of the GPU alone", gain(A10, "pipeline") < 1),
        Statement("3.2", "Inequality (6) then chooses overlap", "the same",
                  f"N_G / N_C {A10.verdict.ratio:.0f}, bound {A10.verdict.bound:.1f}", A10.verdict.wanted == "overlap"),
        Statement("3.3", "the GPU does not wait for the CPU", f"overlap, {overlap.cpu_rows} on the CPU",
                  f"waits {abs(waits):.1f} % of the step", abs(waits) < 1),
        Statement("4.2", "at least eight CPU requests for each of the GPU", "the same",
                  f"best at {overlap.cpu_rows / A10.rows:.1f}", overlap.cpu_rows >= 8 * A10.rows),
        Statement("5.2", "the speedup is about b / a (a: N_G / N_C, b: share of decoding)", "a 10, b 1",
                  f"+{more:.2f} instead of {TENTH}", abs(more / TENTH - 1) < 0.25,
                  "The CPU also computes while the GPU is at the matrices: the gain is (1 + T_gl / T_ga) / a, less "
                  "what CPU requests add to the matrices. 37 % over NEO contradicts b / a, too"),
        Statement("5.3", "latency per token is NEO's or less", "A10 as above, mean over the requests that end",
                  f"{overlap_latency:.0f} ms by overlap, {latency:.0f} ms by pipelining", overlap_latency <= latency,
                  f"A CPU request needs {overlap.cpu_token_steps:.0f} iterations for a token. The paper's latency has "
                  "the time in the queue in it, at request rates that are in a drawing only"),
        Statement("abstract", "T4, LLaMa-2-7B: up to 49 % (5.2: 71 %) over NEO, by overlap",
                  "all 15 GiB usable, none for activations",
                  f"N_G / N_C {t4.ratio:.0f}, bound {t4.bound:.1f}: pipelining", t4.wanted == "overlap",
                  "Not reproduced by the paper's own rule: beside 13.5 GB of weights there is room for "
                  f"{full:,} tokens, whose attention is so short that it pipelines, as NEO does"),
        Statement("abstract", "T4, LLaMa-2-7B: 84 to 96 % over vLLM",
                  f"pipelining, as the rule has it; what fits: {fit} tokens",
                  ", ".join(f"+{100 * (g - 1):.0f} %" for g in t4_gains),
                  all(T4_OVER_VLLM[0] <= g <= T4_OVER_VLLM[1] for g in t4_gains),
                  "The fewer requests fit, the more the CPU adds. Batch and lengths are not in the text, and prompts, "
                  "which slow both down alike, are not simulated"),
        Statement("6", "80 layers on 8 devices make the CPU's waiting period 75 % shorter", "",
                  f"{100 * (1 - 10 / 80):.1f} %", False, "10 of 80 layers are an eighth"),
    ]  # fmt: skip


def otherwise() -> list[Otherwise]:
    """Return the paper's own formulas, other CPUs, and the requests that a stock engine can host."""
    over, pipelined = "overlap over the GPU alone", "pipelining over the GPU alone (paper: no gain)"
    linear, attention = A10.times.linear(A10.rows), A10.times.attention(A10.rows * LENGTH, A10.rows)
    alone, both = linear + attention, 2 * linear + attention
    faster, papers = replace(A10, ratio=0.2), replace(A10, ratio=0.55)

    def requests(strategy: str) -> str:
        return f"{best(A10, strategy).cpu_rows} CPU requests"

    return [
        Otherwise(over, "Eq. 1 to 4: no overheads, CPU requests cost nothing in the matrices", OVER_NEO,
                  1 + TENTH * alone / attention),
        Otherwise(pipelined, "the same", 1.0, (1 + TENTH * both / attention) * alone / both),
        Otherwise(over, "N_C / N_G 0.05", OVER_NEO, gain(replace(A10, ratio=0.05), "overlap")),
        Otherwise(over, f"N_C / N_G 0.2, where the rule chooses {faster.verdict.wanted}", OVER_NEO,
                  gain(faster, "overlap")),
        Otherwise(pipelined, "the same", 1.0, gain(faster, "pipeline")),
        Otherwise(pipelined, "N_C / N_G 0.55: the memory of two Xeon 6342, 16 channels (Table 1)", 1.0,
                  gain(papers, "pipeline")),
        Otherwise(over, f"a stock engine, parked: {requests('parked')} are in every layer's matrices", OVER_NEO,
                  gain(A10, "parked")),
        Otherwise(over, f"a stock engine, parked_apart: {requests('parked_apart')} pass one layer beside the batch",
                  OVER_NEO, gain(A10, "parked_apart")),
    ]  # fmt: skip


def unchecked() -> list[tuple[str, str]]:
    """Return published numbers that could not be checked, with the reasons."""
    return [
        ("11 to 22 % over vLLM, 6 to 16 % over NEO (A10, three traces); 89 % in the abstract",
         "shares of prompts and lengths of the traces are not in the text; the simulator has no prompts. 89 % stands "
         "nowhere but in the abstract and the conclusion"),
        ("5, 17, 22, 31 % over NEO at outputs of 50 to 500 tokens", "prompts are a part of that time"),
        ("Figure 1 (b): 170 us and 3,031 us at batch 4", "a V100; 33.6 MB in 170 us are 197 GB/s, a fifth of its "
         "memory's 900, and the CPU's rate is 5.6 % of that"),
        ("per-token latencies of Figure 6", "in a drawing only, with queues"),
        ("twice NEO's CPU kernel at large batches (4.1)", "our kernels are others: docs/cpu-kernels.md"),
    ]  # fmt: skip
