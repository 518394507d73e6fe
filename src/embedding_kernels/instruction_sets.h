#pragma once

// Included before any header of highway. The kernels are compiled once for each instruction set,
// and the best one that the processor has is taken when they are called. Left out are those that
// bring nothing here, and those whose vectors have no size that the compiler knows, which therefore
// cannot be held in arrays.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
