#include "formats/drivers.h"

namespace tessera::formats {

std::vector<const FormatDriver*> built_in_drivers() {
  return {&native_driver(),      &dcp_driver(),      &torch_checkpointing_driver(),
          &safetensors_driver(), &bin_driver(),      &rank_files_driver(),
          &deepspeed_driver(),   &megatron_driver(), &torch_zip_driver()};
}

std::vector<const FormatWriter*> built_in_writers() {
  return {&native_writer(),    &dcp_writer(),        &safetensors_writer(), &torch_zip_writer(),
          &deepspeed_writer(), &rank_files_writer(), &megatron_writer()};
}

}  // namespace tessera::formats
