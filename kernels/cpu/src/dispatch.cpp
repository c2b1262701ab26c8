#include "dispatch.h"

#include <algorithm>
#include <cstring>

#include "selfcheck.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
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
#elif defined(__aarch64__)
struct CpuFeatures {
  bool dotprod, i8mm, bf16;
  CpuFeatures() {
    // Named HWCAP_ASIMDDP, HWCAP2_I8MM and HWCAP2_BF16 in headers that are new enough.
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    dotprod = first & (1ul << 20);
    i8mm = dotprod && (second & (1ul << 13));
    bf16 = second & (1ul << 14);
  }
};
#else
struct CpuFeatures {};
#endif
[[maybe_unused]] const CpuFeatures& cpu() {
  static const CpuFeatures features;
  return features;
}

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
#elif defined(HB_HAVE_NEON)
    add(hb_isa_neon, true);
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
bool isa_runs(int index) {
  return index == kChosen || (index >= 0 && index < table().count && table().entries[index].runs);
}

int best_isa() {
  for (int i = 0; i < table().count; i++)
    if (table().entries[i].runs) return i;
  return table().count - 1;
}

namespace {

// Classes of shapes, in which the same variant is the fastest.
constexpr int kClasses = 3 * 2 * 3 * 4;
int class_of(const Shape& shape) {
  const int width = shape.head_dim <= 64 ? 0 : shape.head_dim <= 128 ? 1 : 2;
  const int heads = shape.group <= 2 ? shape.group - 1 : shape.group <= 4 ? 2 : 3;
  return ((shape.type * 2 + (shape.kv_type == INT8)) * 3 + width) * 4 + heads;
}

bool fits_all(const Shape&) { return true; }
[[maybe_unused]] bool fits_bf16(const Shape& shape) { return shape.type == BF16; }
[[maybe_unused]] bool fits_tiles(const Shape& shape) { return shape.type == BF16 && shape.head_dim % 32 == 0; }

int index_of(const Isa& isa) {
  int index = 0;
  while (&isa_at(index) != &isa) index++;
  return index;
}

struct Variant {
  const char* name;
  const Isa* isa;
  int isa_index;
  bool runs;
  bool (*fits)(const Shape&);
  PromptKernels prompt;
  ByteKernels bytes;
  const CodeKernels* codes;
  AttendFn (*attend)(const Shape*);
};

struct Variants {
  std::vector<Variant> of[kOperations];
  std::vector<int> order[kOperations][kClasses];

  Variants() {
#if defined(__x86_64__) && defined(HB_HAVE_AVX512)
#if defined(HB_HAVE_AMX) && defined(HB_HAVE_AMX_PROMPT)
    add_prompt("amx", hb_isa_amx, cpu().amx && cpu().bf16, fits_tiles, hb_amx_prompt);
#endif
#ifdef HB_HAVE_AVX512_BF16
    add_prompt("avx512_bf16", hb_isa_avx512, cpu().bf16, fits_bf16, hb_avx512_bf16_prompt);
#endif
#ifdef HB_HAVE_VNNI
    add_bytes("vnni", hb_isa_avx512, cpu().vnni, hb_vnni_bytes);
#endif
#ifdef HB_HAVE_VNNI_ATTEND
    add_partial("vnni", hb_isa_avx512, cpu().vnni, hb_vnni_attend);
#endif
#ifdef HB_HAVE_VBMI
    add_codes("vbmi", hb_isa_avx512, cpu().vbmi, &hb_vbmi_codes);
#endif
#ifdef HB_HAVE_VNNI
    add_codes("vnni", hb_isa_avx512, cpu().vnni, &hb_vnni_codes);
#endif
#endif
#if defined(__x86_64__) && defined(HB_HAVE_AVX2) && defined(HB_HAVE_AVX2_BYTES)
    add_bytes("avx2", hb_isa_avx2, cpu().avx2, hb_avx2_bytes);
#endif
#ifdef HB_HAVE_NEON
#ifdef HB_HAVE_NEON_BF16
    add_prompt("neon_bf16", hb_isa_neon, cpu().bf16, fits_bf16, hb_neon_bf16_prompt);
#endif
#ifdef HB_HAVE_NEON_I8MM
    add_bytes("neon_i8mm", hb_isa_neon, cpu().i8mm, hb_neon_i8mm_bytes);
#endif
#ifdef HB_HAVE_NEON_DOTPROD
    add_bytes("neon_dotprod", hb_isa_neon, cpu().dotprod, hb_neon_dotprod_bytes);
#endif
    add_bytes("neon", hb_isa_neon, true, hb_neon_bytes);
#endif
    for (int i = 0; i < isa_count(); i++) {
#if defined(__x86_64__) && defined(HB_HAVE_AVX2) && defined(HB_HAVE_AVX2_ATTEND)
      if (&isa_at(i) == &hb_isa_avx2) add_partial("avx2_pairs", hb_isa_avx2, cpu().avx2, hb_avx2_attend);
#endif
      add_isa(isa_at(i), isa_runs(i));
    }
    for (int operation = 0; operation < kOperations; operation++)
      for (auto& variants : order[operation])
        for (int i = 0; i < (int)of[operation].size(); i++) variants.push_back(i);
  }

  void add_prompt(const char* name, const Isa& isa, bool runs, bool (*fits)(const Shape&),
                  const PromptKernels& prompt) {
    of[PROMPT].push_back({name, &isa, index_of(isa), runs, fits, prompt, {}, nullptr, nullptr});
  }
  void add_partial(const char* name, const Isa& isa, bool runs, AttendFn (*attend)(const Shape*)) {
    of[PARTIAL].push_back({name, &isa, index_of(isa), runs, fits_all, {}, {}, nullptr, attend});
  }
  void add_bytes(const char* name, const Isa& isa, bool runs, const ByteKernels& bytes) {
    of[BYTES].push_back({name, &isa, index_of(isa), runs, fits_all, {}, bytes, nullptr, nullptr});
  }
  void add_codes(const char* name, const Isa& isa, bool runs, const CodeKernels* codes) {
    of[CODES].push_back({name, &isa, index_of(isa), runs, fits_all, {}, {}, codes, nullptr});
  }
  // An instruction set has one variant of each operation that it implements, unless a better one has its name.
  void add_isa(const Isa& isa, bool runs) {
    const bool has_all = isa.dots;
    for (int operation = 0; operation < kOperations; operation++) {
      if (!has_all && operation != PARTIAL) continue;
      const auto has_name = [&](const Variant& variant) { return !std::strcmp(variant.name, isa.name); };
      if (std::any_of(of[operation].begin(), of[operation].end(), has_name)) continue;
      of[operation].push_back({isa.name,
                               &isa,
                               index_of(isa),
                               runs,
                               fits_all,
                               isa.prompt,
                               {isa.byte_dots, nullptr},
                               &isa.codes,
                               isa.attend});
    }
  }
};

Variants& variants() {
  static Variants v;
  return v;
}

}  // namespace

const char* operation_name(int operation) {
  static const char* const names[] = {"prompt", "partial", "weights", "digests", "bytes", "codes", "shares"};
  static_assert(sizeof names / sizeof *names == kOperations, "");
  return operation >= 0 && operation < kOperations ? names[operation] : "";
}

int variant_count(int operation) { return (int)variants().of[operation].size(); }
const char* variant_name(int operation, int variant) { return variants().of[operation][variant].name; }
int variant_isa(int operation, int variant) { return variants().of[operation][variant].isa_index; }

void set_variant_order(int operation, const Shape& shape, const std::vector<int>& order) {
  variants().order[operation][class_of(shape)] = order;
}

bool take_variant(int operation, int index, const Shape& shape, Kernels& kernels) {
  const Variant& variant = variants().of[operation][index];
  if (!variant.runs || !variant.fits(shape)) return false;
  switch (operation) {
    case PROMPT: kernels.prompt = variant.prompt; return true;
    case PARTIAL: kernels.attend = variant.attend(&shape); return kernels.attend;
    case WEIGHTS: kernels.weigh = variant.isa->weigh(&shape); return true;
    case DIGESTS: kernels.digests = variant.isa; return true;
    case BYTES: kernels.bytes = variant.bytes; return true;
    case CODES: kernels.codes = variant.codes; return true;
    case SHARES: kernels.softmax_add = variant.isa->softmax_add; return true;
  }
  return false;
}

const Isa& base_isa(int isa) {
  int index = isa == kChosen ? best_checked_isa() : isa;
  while (!isa_runs(index) || !isa_at(index).dots) index++;
  return isa_at(index);
}

Kernels kernels_for(int isa, const Shape& shape) {
  Kernels kernels{};
  kernels.base = &base_isa(isa);
  const int best = isa == kChosen ? best_checked_isa() : isa, shape_class = class_of(shape);
  for (int operation = 0; operation < kOperations; operation++) {
    const auto& all = variants().of[operation];
    const auto& order = variants().order[operation][shape_class];
    for (int i = 0; i < (int)all.size(); i++) {
      const int variant = isa == kChosen ? order[i] : i;
      if (all[variant].isa_index >= best && take_variant(operation, variant, shape, kernels)) break;
    }
  }
  return kernels;
}

}  // namespace hb
