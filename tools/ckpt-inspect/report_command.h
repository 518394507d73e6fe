#pragma once

#include <optional>

#include "ckpt-inspect/source.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct ReportOptions {
  std::string path;
  std::vector<std::string> other_paths;  // empty, or one checkpoint to compare with
  std::string output_path;
  std::vector<std::string> patterns;  // empty: all names
  std::string flat_layout_path;
  std::string flat_layout_path_b;
  std::vector<std::string> as_dict;
  RecipeArguments recipe;
  std::optional<double> rtol{};  // both empty: compare bits
  std::optional<double> atol{};  // both empty: compare bits
  bool ignore_dtype = false;     // compare different dtypes as numbers
  bool no_stats = false;         // read no elements: no statistics
  bool overwrite = false;
  WorkOptions work;
};

void add_report_command(CommandLine& line, ReportOptions& options, Terminal& terminal);

/// Writes an HTML page that shows a checkpoint, or the differences between two checkpoints.
ExitCode run_report(const ReportOptions& options, Terminal& terminal);

}  // namespace tessera::cli
