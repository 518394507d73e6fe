#pragma once

#include "tessera/formats/format_driver.h"
#include "tessera/formats/format_writer.h"

namespace tessera::formats {

// Return the drivers of the formats that are built into Tessera. Defined in each format's folder.

const FormatDriver& native_driver();
const FormatDriver& dcp_driver();
const FormatDriver& safetensors_driver();
const FormatDriver& bin_driver();                  // read only
const FormatDriver& torch_checkpointing_driver();  // read only
const FormatDriver& rank_files_driver();
const FormatDriver& deepspeed_driver();
const FormatDriver& megatron_driver();
const FormatDriver& torch_zip_driver();

const FormatWriter& native_writer();
const FormatWriter& dcp_writer();
const FormatWriter& safetensors_writer();
const FormatWriter& torch_zip_writer();
const FormatWriter& rank_files_writer();
const FormatWriter& deepspeed_writer();
const FormatWriter& megatron_writer();

}  // namespace tessera::formats
