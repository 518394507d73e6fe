#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/command_line.h"
#include "cli/part_option.h"

namespace tessera::cli {

/// The options for a move that several workers (processes) do together.
struct WorkerOptions {
  std::string part;     // `I/N`; empty: not given
  std::string workers;  // `auto`, or N; empty: not given
  bool take_over = false;
  std::vector<std::string> arguments;  // of the command line, for `finish`
  /// Set by `finish`: the folder with the workers' shares, symbolic links resolved. Empty: this run
  /// writes a move of its own.
  std::string finished_folder;
};

void add_worker_options(Command& command, WorkerOptions& options);

/// Returns the share that this process writes, from `--part`, or from `--workers` and the
/// launcher's variables; nullopt if neither option is given. Throws: UsageError.
std::optional<PartOfWork> part_of_worker(const WorkerOptions& options);

/// Returns a text with the arguments and the working directory, as JSON. Workers store it, and
/// `finish` runs it again.
std::string command_to_text(const std::vector<std::string>& arguments);
/// The arguments and the working directory of a worker.
struct RecordedCommand {
  std::vector<std::string> arguments;
  std::string directory;
};
/// Parses what `command_to_text` returned. Returns nullopt for '' or other JSON; throws if no JSON.
std::optional<RecordedCommand> command_from_text(const std::string& text, const std::string& path);

}  // namespace tessera::cli
