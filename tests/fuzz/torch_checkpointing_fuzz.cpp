#include <cstdint>
#include <span>

#include "formats/torch_checkpointing.h"
#include "fuzz/packed_files.h"
#include "fuzz/read_everything.h"
#include "tessera/base/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  const fuzz::PackedFiles files(
      std::as_bytes(std::span(data, nbytes)),
      {"metadata.pkl", "model_0.safetensors", "model_1.safetensors", "model_2.safetensors",
       "model_3.safetensors", "model_0.pt", "model_1.pt", "model_2.pt", "optimizer_0.pt",
       "optimizer_1.pt", "optimizer_2.pt"});
  try {
    fuzz::read_everything(*formats::open_torch_checkpointing(files, fuzz::kCheckpointPath));
  } catch (const Error&) {
  }
  return 0;
}
