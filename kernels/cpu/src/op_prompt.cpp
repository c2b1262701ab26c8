// hb_attend_prompt: exact causal attention of a prompt's queries over pages in place.
#include <algorithm>
#include <vector>

#include "api_operations.h"
#include "attend_job.h"
#include "guard.h"
#include "memory.h"
#include "paged.h"
#include "team.h"

using hb::check_id;
using hb::guarded;
using hb::require;

namespace {

constexpr int kPromptFloats = 24 * 1024;  // floats of a block's queries; the block's outputs take as many again

}  // namespace

HB_API int hb_attend_prompt(const hb_attend_prompt_args* args) {
  return guarded([&] {
    const hb_attend_prompt_args& a = *args;
    const hb_model model = hb::model_of(a.kv, a.group, a.scale);
    hb::check_model(model);
    const PromptFn attend = hb::kernels_of(model, (int)a.isa).prompt.attend;
    const int64_t row = hb::row_bytes(a.kv), size = element_size(model.type), dim = a.kv.head_dim,
                  lanes = a.team.threads;
    const int64_t before = a.seq_len - a.tokens;
    require(before >= 0, "a prompt has more new tokens than tokens");
    require(a.seq_len <= a.n * a.kv.page_size, "a prompt has more tokens than its pages hold");
    const int64_t window = a.window ? a.window : a.seq_len;
    for (int64_t i = std::max<int64_t>(before - window + 1, 0) / a.kv.page_size; i * a.kv.page_size < a.seq_len; i++)
      check_id(a.pages[i], a.kv.pages, "page");
    // As many queries as stay in a cache, or fewer where threads would have no work.
    const int64_t most = std::max<int64_t>(kPromptFloats / (dim * a.group), 1);
    const int64_t shared = (a.tokens * a.kv.kv_heads + 4 * lanes - 1) / (4 * lanes);
    const int64_t least = std::max<int64_t>(kPromptRows / a.group, 1);
    const int64_t step = std::min(most, std::max(shared, least));
    const int64_t blocks = (a.tokens + step - 1) / step;
    auto attend_block = [&](int64_t item) {
      static thread_local std::vector<float> room;
      const int64_t head = item % a.kv.kv_heads, begin = (blocks - 1 - item / a.kv.kv_heads) * step;  // longest first
      const int64_t first_head = head * a.group, tokens = std::min(step, a.tokens - begin);
      const PromptBlock block{model.type,
                              hb::kv_type(model),
                              model.head_dim,
                              model.group,
                              model.page_size,
                              model.scale,
                              (int)tokens,
                              before + begin,
                              window,
                              a.q + (begin * a.q_stride + first_head * dim) * size,
                              a.q_stride * size,
                              row,
                              a.out + (begin * a.out_stride + first_head * dim) * size,
                              a.out_stride * size,
                              row,
                              a.pages,
                              hb::keys_of(a.kv, 0, head),
                              hb::page_bytes(a.kv),
                              hb::part_bytes(model),
                              a.k ? a.k + head * row : nullptr,
                              a.v ? a.v + head * row : nullptr,
                              before,
                              a.k_stride * size,
                              a.v_stride * size,
                              a.sinks ? a.sinks + first_head : nullptr,
                              hb::grown_lines(room, prompt_floats(tokens * a.group, dim))};
      attend(&block);
    };
    const int64_t read = std::min(a.seq_len, window + a.tokens) * a.kv.kv_heads * 2 * row;
    hb::share(a.team, read * std::min<int64_t>(a.tokens, 64), blocks * a.kv.kv_heads, attend_block);
  });
}
