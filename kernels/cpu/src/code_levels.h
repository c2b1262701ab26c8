// Best levels for a normal variable (Lloyd, Max), as in kernels/codes.py.
#pragma once

constexpr float kFine = 0.9816f, kInner = 0.4528f, kOuter = 1.5104f, kCoarse = 0.7979f;
constexpr float kFineLoss = 0.1175f, kCoarseLoss = 0.3634f;
constexpr float kOuterEach = 0.163f;  // of a normal variable beyond kFine, on each side
