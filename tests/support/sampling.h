#pragma once

#include <cstdint>

namespace tessera::test {

/// The step of tests that damage each byte of a file, or make each operation fail, one after the
/// other. Under AddressSanitizer, where each takes five times as long, every fifth is tried.
#ifdef __SANITIZE_ADDRESS__
inline constexpr std::int64_t kSampleStep = 5;
#else
inline constexpr std::int64_t kSampleStep = 1;
#endif

}  // namespace tessera::test
