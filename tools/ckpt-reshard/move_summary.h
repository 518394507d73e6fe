#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "arithmetic/combination.h"
#include "base/cast.h"
#include "ckpt-reshard/dequantize_option.h"
#include "ckpt-reshard/move_options.h"
#include "cli/terminal.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/planner.h"

// Prints the result of a move, as text or as JSON (docs/cli/json-schema.md).
namespace tessera::cli {

/// The plan of a run, and its results.
struct Outcome {
  reshard::Plan plan;
  reshard::ExtraFilesPlan extra_files;
  std::uint64_t kept_nbytes = 0;    // bytes that an interrupted run had written
  std::uint64_t linked_nbytes = 0;  // bytes that are in files shared with the base
  std::optional<reshard::SharedMoveOutcome> shared{};  // if several workers write DST
  int num_shares = 1;  // number of shares of the move, one for each worker
  std::vector<reshard::TensorOverflow> overflows{};
  std::vector<reshard::TensorUnderflow> underflows{};
  // Losses from rounding sums and dequantized numbers, of tensors whose name no longer exists after
  // the recipe. Key: the old name. Losses of other tensors: `overflows` and `underflows`.
  std::map<std::string, CastLosses> losses_before_recipe{};
  reshard::FileStates source_files{};  // states of the source's files when they were opened
  std::optional<arithmetic::CombinationCounts> combination{};
  std::optional<Dequantized> dequantized{};
};

/// Prints the result of a run, or what it would do with `--dry-run`. `start`: when the run began to
/// move bytes.
void print_outcome(const MoveOptions& options, const Outcome& outcome,
                   const formats::CheckpointReader& reader,
                   std::chrono::steady_clock::time_point start, Terminal& terminal);
void print_json(const MoveOptions& options, const Outcome& outcome,
                const formats::CheckpointReader& reader, Terminal& terminal);
/// Prints one line for each of the first 100 findings to standard error.
void print_findings(const std::string& prefix, const std::vector<formats::Finding>& findings,
                    Terminal& terminal);
/// Warns if the move turns the numbers of parameters in optimizer state into text keys, because of
/// the destination's format or a rename. PyTorch's optimizers do not find state under such keys.
void warn_of_optimizer_keys(const std::vector<reshard::FormatChangeCount>& changes,
                            Terminal& terminal);

}  // namespace tessera::cli
