#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cli/command_line.h"

namespace tessera::cli {

/// What a tool takes, for the shells that complete its command line.
struct CompletedTool {
  std::string name;
  const std::vector<std::unique_ptr<Command>>& commands;
  std::string default_command;  // that a command line without a verb stands for
};

/// Returns the completion for a shell, `bash`, `zsh` or `fish`, to be sourced, or to be put where
/// that shell looks. Empty for other shells.
std::string completion_for(const std::string& shell, const CompletedTool& tool);

}  // namespace tessera::cli
