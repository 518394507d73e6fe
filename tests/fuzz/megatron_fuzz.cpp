#include <cstdint>
#include <string>
#include <vector>

#include "formats/megatron.h"
#include "fuzz/packed_files.h"
#include "fuzz/read_everything.h"
#include "tessera/base/error.h"

namespace {

const std::vector<std::string> kTwoTensorRanks = {"mp_rank_00/model_optim_rng.pt",
                                                  "mp_rank_01/model_optim_rng.pt"};
const std::vector<std::string> kDistributed = {"mp_rank_00/model_optim_rng.pt",
                                               "mp_rank_00/distrib_optim.pt"};

}  // namespace

/// The first byte chooses the names of the files: 1 for those of the distributed optimizer.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  if (nbytes == 0) return 0;
  const fuzz::PackedFiles files(std::as_bytes(std::span(data + 1, nbytes - 1)),
                                data[0] == 1 ? kDistributed : kTwoTensorRanks);
  try {
    fuzz::read_everything(*formats::open_megatron(files, fuzz::kCheckpointPath));
  } catch (const Error&) {
  }
  return 0;
}
