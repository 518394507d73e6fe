#pragma once

#include <cstdint>
#include <stop_token>

#include "tessera/formats/checkpoint.h"

namespace tessera::inspect {

/// How work that reads tensors' bytes is done. Results depend on none of it.
struct ScanOptions {
  int num_threads = 1;                                     // at least 1
  std::uint64_t memory_nbytes = std::uint64_t{256} << 20;  // for elements, all threads together
  std::stop_token stop{};            // a request ends the work with Error(interrupted)
  formats::ProgressSink progress{};  // told the bytes of elements read; may be empty
};

}  // namespace tessera::inspect
