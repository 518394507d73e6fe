#pragma once

#include "ckpt-inspect/source.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct ShowOptions {
  std::string path;
  std::string name;  // the first name or pattern, which is required
  std::vector<std::string> more_names;
  std::string flat_layout_path;
  std::vector<std::string> as_dict;
  RecipeArguments recipe;
  WorkOptions work;
  int num_bins = 10;  // at most, of the histogram
  bool json = false;
};

void add_show_command(CommandLine& line, ShowOptions& options, Terminal& terminal);

/// Shows all details of single tensors and values.
ExitCode run_show(const ShowOptions& options, Terminal& terminal);

}  // namespace tessera::cli
