#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// A name with the number of a rank or of a part: `1` in `consolidated.01.pth`.
struct NumberedName {
  PartOfWhole::Unit unit = PartOfWhole::Unit::rank;
  std::uint64_t number = 0;
  bool is_padded = false;                // `01`
  std::string series{};                  // the name with `#` for the number: `consolidated.#.pth`
  std::optional<std::uint64_t> count{};  // if the name states it: 3 of `model-1-of-3.pt`
};

/// Returns the number in a name, if it follows the word `rank`, `shard`, `part` or `consolidated`,
/// or is followed by `-of-3`. If a name has several such numbers, returns the last one.
std::optional<NumberedName> numbered_name(std::string_view name);

/// Returns which part of a checkpoint the file at `path` is. It is a part if the names of files
/// beside it differ from its name only in the number. If none does, looks in the same way at the
/// name of its folder and at the folders beside that. A `consolidated.01.pth` is a part even
/// without other files. The numbers of parts are padded with zeros, or are 0, 1, 2, … or 1, 2, 3, …
/// without a gap. Returns nothing for other numbers, as in `lora_rank_8.pt` and `lora_rank_16.pt`,
/// and if the file is no part.
std::optional<PartOfWhole> part_by_names_beside(const FileSystem& fs, const std::string& path);

}  // namespace tessera::formats
