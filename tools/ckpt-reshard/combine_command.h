#pragma once

#include <optional>
#include <string>
#include <vector>

#include "arithmetic/combination.h"
#include "ckpt-reshard/move.h"
#include "cli/command_line.h"
#include "tessera/formats/merge.h"

namespace tessera::cli {

struct CombineCommandOptions {
  std::vector<std::string> sources;     // of --average and --ema
  std::string base;                     // empty: not given
  std::vector<std::string> linear;      // `WEIGHT=SRC`
  std::vector<std::string> subtracted;  // paths of --subtract
  std::vector<std::string> adapters;    // `ADAPTER` or `ADAPTER=SCALE`
  bool averages = false;
  std::optional<double> ema_decay;
  bool normalizes = false;
  arithmetic::Accumulation accumulation = arithmetic::Accumulation::float64;
  formats::MergePreference preference = formats::MergePreference::none;
  MoveOptions move;
};

void add_combine_command(CommandLine& line, CombineCommandOptions& options, Terminal& terminal);

/// Writes a weighted sum of checkpoints, with adapters added.
ExitCode run_combine(const CombineCommandOptions& options, Terminal& terminal);

}  // namespace tessera::cli
