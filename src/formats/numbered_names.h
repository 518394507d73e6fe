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

/// Returns which part of a checkpoint the file at `path` is, if files beside it have names that
/// differ only in the number. Otherwise looks at the name of its folder, and the folders beside
/// that. A `consolidated.01.pth` is a part even without other files. Returns nothing if no names
/// differ only in the number, or if the numbers cannot be numbers of ranks or parts: these are
/// padded with zeros, or have no gap from 0 or 1 on. (The numbers in
/// `lora_rank_8.pt` and `lora_rank_16.pt` are not.)
std::optional<PartOfWhole> part_by_names_beside(const FileSystem& fs, const std::string& path);

}  // namespace tessera::formats
