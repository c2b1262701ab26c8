// Prompts in bf16 for CPUs whose AVX-512 has dot products of bf16 pairs: twice as many multiplications at once.
#include "avx512.h"

#define HAVE_PAIRS
namespace {
INLINE vf add_pairs(vf sum, vf a, vf b) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
INLINE vf pairs_of(vf low, vf high) { return (vf)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }
}  // namespace
#include "prompt.h"

extern "C" const PromptFn hb_avx512_bf16_prompt = attend_prompt<Pairs>;
