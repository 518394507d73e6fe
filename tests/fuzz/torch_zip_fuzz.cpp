#include <cstdint>
#include <string>
#include <vector>

#include "formats/torch_zip.h"
#include "fuzz/packed_files.h"
#include "fuzz/read_everything.h"
#include "tessera/base/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  const fuzz::PackedFiles files(std::as_bytes(std::span(data, nbytes)), {""});
  const std::vector<std::string> classes{"argparse.Namespace", "trainer.config.Config",
                                         "trainer.config.Attributes"};
  for (const std::vector<std::string>& as_dict : {std::vector<std::string>(), classes}) {
    try {
      fuzz::read_everything(
          *formats::open_torch_zip_with_classes(files, fuzz::kCheckpointPath, as_dict));
    } catch (const Error&) {
    }
  }
  return 0;
}
