// Prompts in bf16 for CPUs whose AVX-512 has dot products of bf16 pairs: twice as many multiplications at once.
#include "pairs_avx512.h"
#include "prompt_weights.h"

extern "C" const PromptKernels hb_avx512_bf16_prompt = prompt_kernels<Pairs>();
