#include <cstdint>

#include "fuzz/packed_files.h"
#include "fuzz/read_everything.h"
#include "tessera/base/error.h"
#include "tessera/formats/native.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  const fuzz::PackedFiles files(
      std::as_bytes(std::span(data, nbytes)),
      {"index.h5", "rank-00000.h5", "rank-00001.h5", "base-d942b813d119701d-00000.h5",
       "base-d942b813d119701d-00001.h5"});
  try {
    fuzz::read_everything(*formats::open_native(files, fuzz::kCheckpointPath));
  } catch (const Error&) {
  }
  return 0;
}
