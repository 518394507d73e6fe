#pragma once

#include <cstdint>
#include <string>

#include "ckpt-inspect/source.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct PlanCommandOptions {
  static constexpr int kNotGiven = -1;

  SourceOptions source;
  int world_size = kNotGiven;                           // kNotGiven: as in the checkpoint
  int ranks_per_host = 0;                               // 0: all ranks on one host
  std::uint64_t memory_per_rank_nbytes = 0;             // 0: not given
  std::uint64_t reserved_nbytes = 0;                    // of that memory, not for tables
  int batch_size = 1024;                                // samples per rank and step
  double pooling_factor = 1;                            // mean number of ids in a bag
  std::uint64_t random_row_bandwidth = 10'000'000'000;  // bytes per second
  std::uint64_t host_bandwidth = 10'000'000'000;        // bytes per second, same host
  std::uint64_t network_bandwidth = 1'250'000'000;      // bytes per second, other hosts
  std::string notes_path;                               // empty: not given
  std::string output_path;                              // empty: not given
  bool overwrite = false;
  bool json = false;
};

void add_plan_command(CommandLine& line, PlanCommandOptions& options, Terminal& terminal);

/// Proposes a plan for a checkpoint's embedding tables, with reasons.
ExitCode run_plan(const PlanCommandOptions& options, Terminal& terminal);

}  // namespace tessera::cli
