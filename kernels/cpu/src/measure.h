// Times the variants of an operation, so that the fastest can be taken on a CPU that nobody has measured.
#pragma once
#include <vector>

#include "api.h"
#include "dispatch.h"

namespace hb {

// Shortest time of each variant in seconds, for a small job of the model's shape that stays in a cache. Variants take
// turns, so that a disturbance meets all of them; one that takes twice as long as another soon drops out. NaN: the variant
// does not run here or does not have the shape.
std::vector<double> measure_variants(Operation operation, const hb_model& model, int rounds);

}  // namespace hb
