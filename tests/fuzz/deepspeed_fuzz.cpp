#include <cstdint>
#include <string>
#include <vector>

#include "formats/deepspeed.h"
#include "fuzz/packed_files.h"
#include "fuzz/read_everything.h"
#include "tessera/base/error.h"

namespace {

const std::vector<std::string> kStage1 = {"zero_pp_rank_0_mp_rank_00_optim_states.pt",
                                          "zero_pp_rank_1_mp_rank_00_optim_states.pt",
                                          "mp_rank_00_model_states.pt"};
const std::vector<std::string> kStage3 = {
    "zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"};

}  // namespace

/// The first byte chooses the names of the files: 3 for those of ZeRO stage 3.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  if (nbytes == 0) return 0;
  const fuzz::PackedFiles files(std::as_bytes(std::span(data + 1, nbytes - 1)),
                                data[0] == 3 ? kStage3 : kStage1);
  try {
    fuzz::read_everything(*formats::open_deepspeed(files, fuzz::kCheckpointPath));
  } catch (const Error&) {
  }
  return 0;
}
