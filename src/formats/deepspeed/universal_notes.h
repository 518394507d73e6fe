#pragma once

#include <optional>
#include <string>

#include "formats/deepspeed/universal_entries.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/format_writer.h"

// Notes about what DeepSpeed reads from a universal checkpoint differently from the source.
namespace tessera::formats::deepspeed {

/// Returns a note that parameters of a group have no state, while others have: the writer takes
/// them for frozen ones, and they get no folder. Returns nothing if there is no such parameter.
std::optional<Finding> note_of_params_without_state(const UniversalEntries& entries,
                                                    const std::string& destination);

/// Returns a note that parameters have different steps. ZeRO stage 3 takes one step, the first one
/// in the order of names, for all parameters. Returns nothing if all steps are equal. `contents`:
/// those that `entries` were sorted from; `read`: reads their tensors.
std::optional<Finding> note_of_steps(const UniversalEntries& entries,
                                     const CheckpointContents& contents,
                                     const std::string& destination,
                                     const FormatWriter::ReadElement& read);

}  // namespace tessera::formats::deepspeed
