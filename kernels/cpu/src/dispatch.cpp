#include "dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hb {
namespace {

#if defined(__x86_64__)
struct CpuFeatures {
  bool avx2 = false, avx512 = false, vnni = false, vbmi = false, bf16 = false, amx = false;
  CpuFeatures() {
    unsigned a, b, c, d, a7, b7, c7, d7;  // registers of leaf 1 and of leaf 7
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return;  // no OSXSAVE
    if (!__get_cpuid_count(7, 0, &a7, &b7, &c7, &d7)) return;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    const bool ymm = (low & 0x6) == 0x6, zmm = (low & 0xe6) == 0xe6, tiles = (low & 0x60000) == 0x60000;
    const bool fma = c & (1u << 12), f16c = c & (1u << 29);
    avx2 = ymm && fma && f16c && (b7 & (1u << 5));
    const unsigned f_dq_bw_vl = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);
    avx512 = zmm && avx2 && (b7 & f_dq_bw_vl) == f_dq_bw_vl;
    vnni = avx512 && (c7 & (1u << 11));
    vbmi = avx512 && (c7 & (1u << 1));
    unsigned a71, b71, c71, d71;  // of leaf 7.1
    bf16 = avx512 && __get_cpuid_count(7, 1, &a71, &b71, &c71, &d71) && (a71 & (1u << 5));
    const unsigned tile_and_bf16 = (1u << 24) | (1u << 22);
    amx = avx512 && tiles && (d7 & tile_and_bf16) == tile_and_bf16 && may_use_tiles();
#ifdef HB_EMULATE_TILES
    amx = avx512;  // for tests
#endif
  }
  // Linux hands out tile state on request, once per process.
  static bool may_use_tiles() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  }
};
[[maybe_unused]] const CpuFeatures& cpu() {
  static const CpuFeatures features;
  return features;
}
#endif

struct Entry {
  const Isa* isa;
  bool runs;
};

struct Table {
  Entry entries[4];
  int count = 0;
  Table() {
#if defined(__x86_64__)
#ifdef HB_HAVE_AMX
    add(hb_isa_amx, cpu().amx);
#endif
#ifdef HB_HAVE_AVX512
    add(hb_isa_avx512, cpu().avx512);
#endif
#ifdef HB_HAVE_AVX2
    add(hb_isa_avx2, cpu().avx2);
#endif
#endif
    add(hb_isa_generic, true);
  }
  void add(const Isa& isa, bool runs) { entries[count++] = {&isa, runs}; }
};

const Table& table() {
  static const Table t;
  return t;
}

}  // namespace

int isa_count() { return table().count; }
const Isa& isa_at(int index) { return *table().entries[index].isa; }
bool isa_runs(int index) { return index >= 0 && index < table().count && table().entries[index].runs; }

int best_isa() {
  for (int i = 0; i < table().count; i++)
    if (table().entries[i].runs) return i;
  return table().count - 1;
}

#if defined(__x86_64__)
namespace {

// Whether an instruction set may be helped out by code for another one.
[[maybe_unused]] bool takes_avx2(int isa) { return isa_at(isa).name != hb_isa_generic.name; }
#ifdef HB_HAVE_AVX512
[[maybe_unused]] bool takes_avx512(int isa) { return takes_avx2(isa) && isa_at(isa).name != hb_isa_avx2.name; }
#endif

}  // namespace
#endif

ByteKernels byte_kernels_for(int isa) {
#if defined(__x86_64__)
#if defined(HB_HAVE_AVX512) && defined(HB_HAVE_VNNI)
  if (cpu().vnni && takes_avx512(isa)) {
    ByteKernels found = hb_vnni;
#ifdef HB_HAVE_VBMI
    if (cpu().vbmi) found.codes = &hb_vbmi_codes;
#endif
    return found;
  }
#endif
#ifdef HB_HAVE_AVX2_BYTES
  if (cpu().avx2 && takes_avx2(isa)) return hb_avx2_bytes;
#endif
#endif
  while (!isa_runs(isa) || !isa_at(isa).byte_dots) isa++;
  return {isa_at(isa).byte_dots, nullptr, nullptr};
}

Kernels kernels_for(int isa, const Shape& shape) {
  Kernels found{nullptr, nullptr, nullptr};
  for (int i = isa; i < table().count; i++) {
    const Entry& entry = table().entries[i];
    if (!entry.runs) continue;
    if (!found.attend) found.attend = entry.isa->attend(&shape);
    if (!found.base && entry.isa->dots) found.base = entry.isa;
    if (found.attend && found.base) break;
  }
  found.prompt = found.base->prompt;
#if defined(__x86_64__) && defined(HB_HAVE_AVX512) && defined(HB_HAVE_AVX512_BF16)
  if (shape.type == BF16 && cpu().bf16 && takes_avx512(isa)) found.prompt = hb_avx512_bf16_prompt;
#ifdef HB_HAVE_AMX_PROMPT
  const bool takes_tiles = isa_at(isa).name == hb_isa_amx.name && shape.head_dim % 32 == 0;
  if (shape.type == BF16 && cpu().bf16 && cpu().amx && takes_tiles) found.prompt = hb_amx_prompt;
#endif
#endif
  return found;
}

}  // namespace hb
