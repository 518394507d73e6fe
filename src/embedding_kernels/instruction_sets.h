#pragma once

// Include this before any header of highway. The kernels are compiled once per instruction set, and
// a call uses the best set that the processor has. The line below disables sets that are not faster
// for these kernels, and sets whose vector size is unknown at compile time, because arrays cannot
// have such vectors as elements.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
