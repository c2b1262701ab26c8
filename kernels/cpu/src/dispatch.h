// Which instruction sets this library was built with, and which of them the CPU runs.
#pragma once
#include "isa.h"

namespace hb {

int isa_count();
const Isa& isa_at(int index);
bool isa_runs(int index);
int best_isa();

// What to call for one shape: the asked ISA, or the next lower one where it leaves a function out.
struct Kernels {
  AttendFn attend;
  const Isa* base;  // has every function but perhaps the best `attend` and `prompt`
  PromptFn prompt;
};
ByteKernels byte_kernels_for(int isa);
Kernels kernels_for(int isa, const Shape& shape);

}  // namespace hb
