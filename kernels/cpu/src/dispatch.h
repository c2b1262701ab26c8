// The instruction sets and kernels of this library, those that the CPU runs, and the choice among them.
#pragma once
#include <vector>

#include "api.h"
#include "isa.h"

namespace hb {

int isa_count();
const Isa& isa_at(int index);
bool isa_runs(int index);  // true for kChosen
int best_isa();

// A number that selects the fastest variant of each operation (set_variant_order) instead of one instruction set.
constexpr int kChosen = HB_CHOSEN;

// Operations that several kernels can compute; those kernels are the operation's variants.
enum Operation {
  PROMPT,   // attention of a prompt's queries, and the weights of its last ones
  PARTIAL,  // attention of decoding rows
  WEIGHTS,  // moving averages of attention weights
  DIGESTS,  // scores by digests in the model's type
  BYTES,    // scores by digests in bytes
  CODES,    // scores by digests in codes
  SHARES,   // softmax of scores
  kOperations
};
const char* operation_name(int operation);

// A variant is numbered by its place in the default order, which assumes that a newer instruction set is faster.
int variant_count(int operation);
const char* variant_name(int operation, int variant);
int variant_isa(int operation, int variant);  // the variant is for this instruction set and better ones

// Sets the order in which an operation's variants are tried for the shapes of one class: element type and that of K and
// V, head_dim up to 64, 128 or 512, and group 1, 2, up to 4 or more. The first variant is taken that runs on this CPU and has the shape.
// Orders are read without a lock: set them before other threads use the library.
void set_variant_order(int operation, const Shape& shape, const std::vector<int>& variants);

// The kernels for one shape.
struct Kernels {
  const Isa* base;  // conversions and rotations, which have no variants
  PromptKernels prompt;
  AttendFn attend;
  WeighFn weigh;
  const Isa* digests;  // `dots`, and the `prepare_weights` that belongs to it
  ByteKernels bytes;
  const CodeKernels* codes;
  SoftmaxAddFn softmax_add;
};
// Returns the kernels of an instruction set in the default order, completed by those of lower sets; or the chosen ones.
Kernels kernels_for(int isa, const Shape& shape);
// Returns the best instruction set at or below `isa` that implements all operations.
const Isa& base_isa(int isa);
// Puts a variant into `kernels`. False where it does not run on this CPU or does not have the shape.
bool take_variant(int operation, int variant, const Shape& shape, Kernels& kernels);

}  // namespace hb
