#pragma once

#include <string>

#include "ckpt-inspect/source.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct RecipeCommandOptions {
  std::string action;  // `check`
  SourceOptions source;
  bool json = false;
};

void add_recipe_command(CommandLine& line, RecipeCommandOptions& options, Terminal& terminal);

/// Checks whether a recipe fits the names and shapes of a checkpoint. Returns ExitCode::findings if
/// not. A recipe that fits but has no inverse, such as one with a slice, is no finding.
ExitCode run_recipe(const RecipeCommandOptions& options, Terminal& terminal);

}  // namespace tessera::cli
