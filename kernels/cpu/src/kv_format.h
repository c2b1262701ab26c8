// K and V as pages hold them: in the model's type, or in 8 bits. In 8 bits a page's head is [2 (K|V), page_size,
// head_dim] int8, then [2, page_size] fp16 scales, contiguous. A token's number is scale * int8. The scale is the largest
// magnitude of the token's head / 127, rounded up to fp16 (kernels/kv_format.py).
#pragma once
#include <stdint.h>

#include "api.h"
#include "isa.h"

namespace hb {

inline int kv_type(const hb_model& model) { return model.kv_encoding == HB_KV_INT8 ? INT8 : model.type; }
// Bytes of one token's K or V of one head, without its scale.
inline int64_t kv_row_bytes(const hb_model& model) { return (int64_t)model.head_dim * element_size(kv_type(model)); }
// Bytes of K, or of V, of one head of a page, without scales: from a page's first key to its first value.
inline int64_t part_bytes(const hb_model& model) { return model.page_size * kv_row_bytes(model); }
inline int64_t scale_bytes(const hb_model& model) { return kv_type(model) == INT8 ? 4 * (int64_t)model.page_size : 0; }
inline int64_t head_bytes(const hb_model& model) { return 2 * part_bytes(model) + scale_bytes(model); }

enum Part { KEYS_PART = 0, VALUES_PART = 1 };
// Writes head_dim numbers of the model's type as a token's K or V. `head`: the first byte of one head of a page.
void encode_row(const hb_model& model, const Isa& isa, const char* from, char* head, Part part, int64_t token);
// Reads a token's K or V, in fp32.
void decode_row(const hb_model& model, const Isa& isa, const char* head, Part part, int64_t token, float* to);
// Returns a token's key in the model's type: where it lies, or decoded into `room`, which holds head_dim fp32 numbers.
const char* key_of(const hb_model& model, const Isa& isa, const char* head, int64_t token, float* room);
// Copies a token's K and V of one head, encoded, between pages of the same layout.
void copy_token(const hb_model& model, const hb_cache& cache, const char* from_head, int64_t from, char* to_head,
                int64_t to);

}  // namespace hb
