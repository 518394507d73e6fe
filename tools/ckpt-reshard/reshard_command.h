#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "cli/command_line.h"
#include "tessera/formats/native.h"
#include "tessera/reshard/planner.h"

namespace tessera::cli {

struct ReshardOptions {
  static constexpr int kNotGiven = std::numeric_limits<int>::min();

  std::string source;
  std::string destination;
  std::optional<formats::Format> format;  // none: as the destination's name suggests
  int world_size = kNotGiven;
  std::string strategy;
  std::string table_plan_path;
  std::string units_path;
  std::string flat_layout_path;
  std::string compress = "none";
  std::vector<std::string> only;
  std::vector<std::string> renames;
  reshard::OptimizerNames optimizer_names = reshard::OptimizerNames::as_stored;
  std::string cast;
  bool allow_missing = false;
  bool allow_lossy = false;
  std::uint64_t memory_nbytes = std::uint64_t{256} << 20;
  std::uint64_t max_shard_nbytes = 0;  // 0: not given
  int num_threads = kNotGiven;         // as many as there are cores
  bool dry_run = false;
  bool overwrite = false;
  bool quiet = false;
  bool json = false;
};

void add_reshard_command(CommandLine& line, ReshardOptions& options, Terminal& terminal);

/// Plans, moves and commits; or only plans.
ExitCode run_reshard(ReshardOptions options, Terminal& terminal);

}  // namespace tessera::cli
