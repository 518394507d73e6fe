#include <cstdint>

#include "fuzz/packed_files.h"
#include "fuzz/read_everything.h"
#include "tessera/base/error.h"
#include "tessera/formats/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  const fuzz::PackedFiles files(
      std::as_bytes(std::span(data, nbytes)),
      {"model.safetensors.index.json", "model.safetensors.values.json",
       "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"});
  try {
    fuzz::read_everything(*formats::open_safetensors(files, fuzz::kCheckpointPath));
  } catch (const Error&) {
  }
  return 0;
}
