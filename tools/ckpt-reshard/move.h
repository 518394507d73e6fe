#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "arithmetic/combination.h"
#include "ckpt-reshard/dequantize_option.h"
#include "ckpt-reshard/move_options.h"
#include "cli/exit_code.h"
#include "cli/terminal.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::cli {

/// The checkpoint to move, as opened by a verb, and problems that only the verb can find (the
/// plan does not find them).
struct MoveSource {
  std::unique_ptr<formats::CheckpointReader> reader;
  std::vector<formats::Finding> problems{};
  std::size_t num_unordered_dicts = 0;  // PlanOptions::num_unordered_dicts
  reshard::NamePrefixes prefixes{};     // each prefix must select a name
  /// Only for `combine`, which copies only the extra files of the first source.
  std::optional<arithmetic::CombinationCounts> combination{};
  std::set<DType> widened{};  // arithmetic::CombinedCheckpoint::widened
  std::optional<Dequantized> dequantized{};
  /// Counts, while elements are read, sums and dequantized numbers that became zero or too large.
  std::shared_ptr<arithmetic::RoundingLosses> losses =
      std::make_shared<arithmetic::RoundingLosses>();
};

/// Plans, writes and commits; with `dry_run`, only plans and checks. Returns bad_input if the plan
/// has problems. Checks the options, then calls `open`, which must read `paths` only through `fs`.
ExitCode run_move(MoveOptions options, const std::vector<std::string>& paths,
                  const std::function<MoveSource(const FileSystem& fs)>& open, Terminal& terminal);

}  // namespace tessera::cli
