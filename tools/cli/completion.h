#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cli/command_line.h"

namespace tessera::cli {

/// The commands of a tool, for completion in shells.
struct CompletedTool {
  std::string name;
  const std::vector<std::unique_ptr<Command>>& commands;
  std::string default_command;  // runs if the command line has no verb
};

/// Returns a completion script for `bash`, `zsh` or `fish`, to be sourced or put into the folder
/// that the shell searches. Empty for other shells.
std::string completion_for(const std::string& shell, const CompletedTool& tool);

}  // namespace tessera::cli
