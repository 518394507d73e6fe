#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

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
  bool is_parallel_rank = false;         // behind a word such as `tp`, without the word `rank`
};

/// Returns the numbers in a name that follow the word `rank`, `shard`, `part` or `consolidated`, or
/// one for a way to be parallel (`tp`, `pp`, `dp`, `wp` or `zo`, as in `model_tp0_pp1.pt`), and the
/// number in DCP's `__1.metadata`, from last to first; then those before `-of-3`, `_of_3`
/// or `-mp3`, but not behind `epoch`, `step` or `iter`. Empty if the name has none.
std::vector<NumberedName> numbered_names(std::string_view name);

/// Returns the first of `numbered_names(name)`, or nothing if that list is empty.
std::optional<NumberedName> numbered_name(std::string_view name);

/// Returns which part of a checkpoint the file at `path` is; nothing if it is no part. The file is
/// a part if names of files beside it differ from its name only in a number that `numbered_names`
/// finds (so `epoch_1.pt` is no part). If they differ in several such numbers, one at a time, the
/// number of parts is the product: 4 for `tp_rank_0_pp_rank_0.pt` to `tp_rank_1_pp_rank_1.pt`. If
/// no file beside it has such a name, and the folder of the file is named after a rank, looks in
/// the same way at the folders beside that folder. `consolidated.01.pth` (not `00`),
/// `__1.metadata` (not `0`) and names with a count of at least 2, such as `model-1-of-3.pt`, are
/// parts even without other files. Of other names, only numbers with leading zeros, or without a
/// gap (0, 1, 2, … or 1, 2, 3, …) count as numbers of parts; so `lora_rank_8.pt` and
/// `lora_rank_16.pt` are no parts. Numbers of parallel ranks must begin with 0: `model_tp1.pt` and
/// `model_tp2.pt` may be trained on 1 and 2 ranks.
std::optional<PartOfWhole> part_by_names_beside(const FileSystem& fs, const std::string& path);

}  // namespace tessera::formats
