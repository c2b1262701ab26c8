// Measurement of an operation's variants, for CPUs without a rule in kernels/cpu/variants.py.
#pragma once
#include "api.h"
#include "dispatch.h"

namespace hb {

// seconds[variant_count]: the shortest time of each variant, for a small job of the model's shape. Variants take turns,
// so that a disturbance meets all of them; one that takes twice as long as another soon drops out. NaN before the call
// leaves a variant out. NaN after it: the variant was left out, does not run here, or does not have the shape.
void measure_variants(Operation operation, const hb_model& model, int rounds, double* seconds);

}  // namespace hb
