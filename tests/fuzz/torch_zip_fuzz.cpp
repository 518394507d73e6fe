#include <cstdint>

#include "formats/torch_zip.h"
#include "fuzz/packed_files.h"
#include "fuzz/read_everything.h"
#include "tessera/base/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  const fuzz::PackedFiles files(std::as_bytes(std::span(data, nbytes)), {""});
  try {
    fuzz::read_everything(*formats::open_torch_zip(files, fuzz::kCheckpointPath));
  } catch (const Error&) {
  }
  return 0;
}
