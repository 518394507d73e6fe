#pragma once

#include <vector>

#include "tessera/formats/format_driver.h"
#include "tessera/formats/format_writer.h"

namespace tessera::formats {

/// Returns the drivers of all formats that are built into Tessera, in the order in which they are
/// asked whether a checkpoint is theirs. Formats that have a marker file in the directory come
/// before formats that are recognized only by file names.
std::vector<const FormatDriver*> built_in_drivers();

// Each of these functions is defined in the folder of its format. The list of writers is in
// format_writer.cpp, so that a program that only reads links no writer, and no HDF5.

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
