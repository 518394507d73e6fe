#pragma once

#include <cstdint>
#include <stop_token>

#include "tessera/formats/checkpoint.h"

namespace tessera::inspect {

/// How to read tensors' bytes. Does not change the results.
struct ScanOptions {
  int num_threads = 1;                                     // at least 1
  std::uint64_t memory_nbytes = std::uint64_t{256} << 20;  // for elements, of all threads together
  std::stop_token stop{};            // a stop request throws Error(interrupted)
  formats::ProgressSink progress{};  // gets the number of element bytes read; may be empty
};

}  // namespace tessera::inspect
