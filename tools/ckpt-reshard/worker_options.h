#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/command_line.h"
#include "cli/part_option.h"

namespace tessera::cli {

/// The options by which several workers do one move.
struct WorkerOptions {
  std::string part;     // `I/N`; empty: not given
  std::string workers;  // `auto`, or N; empty: not given
  bool take_over = false;
  std::vector<std::string> arguments;  // of the command line, for `finish`
  /// The shares' folder that `finish` asks to finish, without links; empty: this run writes.
  std::string finished_folder;
};

void add_worker_options(Command& command, WorkerOptions& options);

/// Returns the part that the options and the launcher's variables give to this process; nothing if
/// the options ask for one process. Throws: UsageError.
std::optional<PartOfWork> part_of_worker(const WorkerOptions& options);

/// Returns the text that `finish` runs later: the arguments and the working directory, as JSON.
std::string command_to_text(const std::vector<std::string>& arguments);
/// The arguments and the working directory of a worker.
struct RecordedCommand {
  std::vector<std::string> arguments;
  std::string directory;
};
/// Undoes `command_to_text`; returns nothing for another text.
std::optional<RecordedCommand> command_from_text(const std::string& text, const std::string& path);

}  // namespace tessera::cli
