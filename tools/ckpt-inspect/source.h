#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "cli/command_line.h"
#include "cli/json_output.h"
#include "cli/progress.h"
#include "cli/stop_signals.h"
#include "inspect/summary.h"
#include "tessera/base/parallel.h"
#include "tessera/base/rename.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/inspect/tensor_reader.h"

namespace tessera::cli {

/// The version of every JSON document that ckpt-inspect prints (docs/cli/json-schema.md).
inline constexpr int kInspectJsonSchema = 1;

/// What a command's help says of the checkpoint that it takes.
inline constexpr const char* kPathHelp =
    "A checkpoint: native, safetensors, DCP or torch.save. The tool detects the format. - reads "
    "standard input";

/// Which checkpoint a command looks into, and at which names.
struct SourceOptions {
  std::string path;
  std::vector<std::string> patterns;  // empty: all
  std::string flat_layout_path;       // empty: not given
};

/// How a command that reads tensors' bytes does so.
struct WorkOptions {
  std::uint64_t memory_nbytes = kDefaultMemoryNbytes;
  int num_threads = 0;  // 0: as many as there are cores
  ProgressOptions progress{};
};

/// Adds `PATH [GLOB...]`. Options are printed in the order they are added, so a command adds its
/// own in between.
void add_source_arguments(Command& command, SourceOptions& options);
void add_flat_layout_option(Command& command, SourceOptions& options);
void add_work_options(Command& command, WorkOptions& options);

/// Opens the checkpoint, which is then there until the process ends. The path `-` is what standard
/// input brings, read once and to its end.
const formats::CheckpointReader* open_source(const SourceOptions& options);

/// As above. Says on standard error which of its files are lost, and what was in them with them.
const formats::CheckpointReader* open_source(const SourceOptions& options, Terminal& terminal);

/// Begins a document about a checkpoint: its format, and which of its files are lost, if any.
void write_source(JsonOutput& json, std::string_view format,
                  const formats::CheckpointContents& contents);

inspect::Selection select_names(const formats::CheckpointReader& reader,
                                const SourceOptions& options);

/// Throws Error(invalid_argument) where a pattern matches no name of either: it is a mistake.
/// `renames` are of A's names.
void require_patterns_used(const NameSelection& names, const formats::CheckpointReader& a,
                           const formats::CheckpointReader& b, const std::vector<Rename>& renames);

/// Long work over tensors' bytes: can be interrupted, and shows how far it is.
class Work {
 public:
  Work(Terminal& terminal, std::string phase, std::uint64_t total_nbytes,
       const WorkOptions& options);
  inspect::ScanOptions scan_options();

 private:
  StopSignals signals_;
  Progress progress_;
  WorkOptions options_;
};

/// Returns the format, with its ranks where the format knows them: `native, 4 ranks`.
std::string format_in_words(const formats::CheckpointReader& reader);

/// A value's type and itself, for a line of a table. One that is of a kind which is never read (an
/// object of a class) is `refused`, one that is lost or damaged is `unreadable`, with the reason:
/// what stands beside it can be listed. Throws: Error(io).
struct ValueWords {
  std::string type;
  std::string text;
};
ValueWords value_in_words(const formats::CheckpointReader& reader, std::size_t value_index);

/// Returns a value as JSON; one that is refused as `{"$refused": "<reason>"}`, one that is lost or
/// damaged as `{"$unreadable": "<reason>"}`. Throws: Error(io).
std::string value_as_json(const formats::CheckpointReader& reader, std::size_t value_index);

/// Returns what names add up to: `3 tensors, 1 value`.
std::string counts_in_words(const inspect::Totals& totals);

}  // namespace tessera::cli
