#include <cstdint>
#include <string>
#include <vector>

#include "formats/bin.h"
#include "fuzz/packed_files.h"
#include "fuzz/read_everything.h"
#include "tessera/base/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  const fuzz::PackedFiles files(std::as_bytes(std::span(data, nbytes)),
                                {"pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin",
                                 "pytorch_model-00002-of-00002.bin"});
  try {
    fuzz::read_everything(*formats::open_bin(files, fuzz::kCheckpointPath));
  } catch (const Error&) {
  }
  return 0;
}
