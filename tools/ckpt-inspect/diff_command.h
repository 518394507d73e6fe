#pragma once

#include <optional>

#include "ckpt-inspect/source.h"
#include "cli/command_line.h"
#include "inspect/diff.h"

namespace tessera::cli {

struct DiffCommandOptions {
  std::string path_a;
  std::string path_b;
  std::vector<std::string> patterns;
  std::vector<std::string> renames;  // `FROM=TO`, for A's names
  std::string flat_layout_path_a;
  std::string flat_layout_path_b;
  std::vector<std::string> as_dict;
  RecipeArguments recipe;
  std::optional<double> rtol{};  // both empty: compare bits
  std::optional<double> atol{};  // both empty: compare bits
  bool ignore_dtype = false;     // compare different dtypes as numbers
  bool json = false;
  WorkOptions work;
};

void add_diff_command(CommandLine& line, DiffCommandOptions& options, Terminal& terminal);

/// Compares two checkpoints and shows progress. Throws: Error(invalid_argument) if a pattern of
/// `options.names` matches no name, or if they together select none.
inspect::DiffReport compare(const formats::CheckpointReader& a, const formats::CheckpointReader& b,
                            inspect::DiffOptions options, const WorkOptions& work_options,
                            Terminal& terminal);

/// Compares two checkpoints. Returns ExitCode::findings if they differ.
ExitCode run_diff(const DiffCommandOptions& options, Terminal& terminal);

}  // namespace tessera::cli
