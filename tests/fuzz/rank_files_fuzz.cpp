#include <cstdint>
#include <string>
#include <vector>

#include "formats/rank_files.h"
#include "fuzz/packed_files.h"
#include "fuzz/read_everything.h"
#include "tessera/base/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  const fuzz::PackedFiles files(std::as_bytes(std::span(data, nbytes)),
                                {"model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"});
  try {
    fuzz::read_everything(*formats::open_rank_files(files, fuzz::kCheckpointPath));
  } catch (const Error&) {
  }
  return 0;
}
