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

/// Returns the last number in a name that follows the word `rank`, `shard`, `part` or
/// `consolidated`, or the number in DCP's `__1.metadata`. In a name without such a number, returns
/// the one before `-of-3` or `_of_3`. Nothing if the name has neither.
std::optional<NumberedName> numbered_name(std::string_view name);

/// Returns which part of a checkpoint the file at `path` is; nothing if it is no part. The file is
/// a part if names of files beside it differ from its name only in the number that `numbered_name`
/// finds (so `epoch_1.pt` is no part). If no file beside it has such a name, and the folder of the
/// file is named after a rank, looks in the same way at the folders beside that folder.
/// `consolidated.01.pth` (not `00`) and `__1.metadata` (not `0`) are parts even without other
/// files. Of other names, only numbers with leading zeros, with `-of-3` after them, or without a
/// gap (0, 1, 2, … or 1, 2, 3, …) count as numbers of parts; so `lora_rank_8.pt` and
/// `lora_rank_16.pt` are no parts.
std::optional<PartOfWhole> part_by_names_beside(const FileSystem& fs, const std::string& path);

}  // namespace tessera::formats
