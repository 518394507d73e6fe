#include <cstdint>

#include "formats/dcp.h"
#include "fuzz/packed_files.h"
#include "fuzz/read_everything.h"
#include "tessera/base/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  const fuzz::PackedFiles files(std::as_bytes(std::span(data, nbytes)),
                                {".metadata", "__0_0.distcp", "__1_0.distcp"});
  try {
    fuzz::read_everything(*formats::open_dcp(files, fuzz::kCheckpointPath));
  } catch (const Error&) {
  }
  return 0;
}
