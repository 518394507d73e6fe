#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "formats/flat_layout.h"
#include "fuzz/packed_files.h"
#include "tessera/base/error.h"
#include "tessera/layout/flat_unit.h"

/// Reads the input as both files that describe flat parameters: of a source and of a destination.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  const fuzz::PackedFiles files(std::as_bytes(std::span(data, nbytes)), {""});
  try {
    static_cast<void>(formats::read_flat_layout(files, fuzz::kCheckpointPath));
  } catch (const Error&) {
  }
  try {
    constexpr int kWorldSize = 3;
    const std::string_view text(reinterpret_cast<const char*>(data), nbytes);
    for (const FlatUnit& unit : flat_units_from_json(text, "input")) {
      for (const FlatUnitParameter& parameter : unit.parameters) {
        std::int64_t numel = 0;
        for (int rank = 0; rank < kWorldSize; ++rank) {
          numel += shard_of_parameter(unit, parameter, rank, kWorldSize).numel();
        }
        if (numel != numel_of(parameter.shape)) std::abort();
      }
    }
  } catch (const Error&) {
  }
  return 0;
}
