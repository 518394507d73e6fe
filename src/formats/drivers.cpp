#include "formats/drivers.h"

namespace tessera::formats {

std::vector<const FormatDriver*> built_in_drivers() {
  return {&native_driver(),      &dcp_driver(),      &torch_checkpointing_driver(),
          &safetensors_driver(), &bin_driver(),      &rank_files_driver(),
          &deepspeed_driver(),   &megatron_driver(), &torch_zip_driver()};
}

}  // namespace tessera::formats
