#include <cstdint>
#include <span>

#include "fuzz/packed_files.h"
#include "inspect/pickle_scan/pickle_scan.h"
#include "tessera/base/error.h"

/// Scans one file of any kind.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  const fuzz::PackedFiles files(std::as_bytes(std::span(data, nbytes)), {""});
  static_cast<void>(inspect::scan_pickles(files, {fuzz::kCheckpointPath},
                                          {.max_inflated_nbytes = std::uint64_t{1} << 16}));
  return 0;
}
