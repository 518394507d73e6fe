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
#include "cli/recipe_option.h"
#include "cli/stop_signals.h"
#include "cli/threads_option.h"
#include "formats/extra_entries.h"
#include "inspect/summary.h"
#include "tessera/base/file_system.h"
#include "tessera/base/name_rules.h"
#include "tessera/base/parallel.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/inspect/tensor_reader.h"

namespace tessera::cli {

/// The version of every JSON document that ckpt-inspect prints (docs/cli/json-schema.md).
inline constexpr int kInspectJsonSchema = 1;

/// The help text of the argument PATH.
inline constexpr const char* kPathHelp =
    "A checkpoint of any format that ckpt-inspect --help lists. The tool detects the format. - "
    "reads standard input";

/// The checkpoint that a command reads, and the names in it that the user asks for.
struct SourceOptions {
  std::string path;
  std::vector<std::string> patterns;   // the arguments GLOB; empty: all names
  std::string flat_layout_path{};      // empty: not given
  std::vector<std::string> as_dict{};  // classes whose objects are read as dicts
  RecipeArguments recipe{};
};

/// The options of a command that reads tensors' bytes.
struct WorkOptions {
  std::uint64_t memory_nbytes = kDefaultMemoryNbytes;
  int num_threads = kDefaultThreads;
  ProgressOptions progress{};
};

// Each of these functions adds options to a command. The help lists options in the order in which
// they are added.

/// Adds the arguments `PATH [GLOB...]`.
void add_source_arguments(Command& command, SourceOptions& options);
void add_flat_layout_option(Command& command, SourceOptions& options);
void add_as_dict_option(Command& command, std::vector<std::string>& as_dict);
void add_work_options(Command& command, WorkOptions& options);

/// Opens the checkpoint. The reader lives until the process ends. The path `-` is standard input,
/// which is read once (see StandardInput).
const formats::CheckpointReader* open_source(const SourceOptions& options);

/// Opens the checkpoint as above, and prints notes to standard error: about missing files, files of
/// other formats, a checkpoint that is only a part, findings while opening, classes whose objects
/// were read as dicts or by state_dict(), and exclusions (`!GLOB`) that match no name.
const formats::CheckpointReader* open_source(const SourceOptions& options, Terminal& terminal);

/// The file system that the sources are opened from.
const FileSystem& source_file_system();

/// Throws Error(mismatch) if another program has changed or replaced a file since just before it
/// was opened here (SourceFiles::require_unchanged): what was read may be half of one checkpoint
/// and half of another. Call it after the last read, and before the result is printed if possible.
void require_sources_unchanged();

/// Two open checkpoints. The readers live until the process ends.
struct TwoSources {
  const formats::CheckpointReader* a;
  const formats::CheckpointReader* b;
};
/// Opens two checkpoints, and prints the notes of `open_source` about each, except those about
/// exclusions. Requires: `a` and `b` have the same `as_dict`. Throws: Error(invalid_argument)
/// naming the first class in `as_dict` of which neither checkpoint has an object.
TwoSources open_two_sources(const SourceOptions& a, const SourceOptions& b, Terminal& terminal);

/// Writes the first members of each document about a checkpoint: `format`; then `part` if the
/// checkpoint is only a part, and `missing_files` if files are missing.
void write_source(JsonOutput& json, std::string_view format,
                  const formats::CheckpointContents& contents);

/// The extra files (such as config.json) that lie directly in the directory of a checkpoint, sorted
/// by name; no links, no folders. Empty for a checkpoint that is a single file.
struct ExtraFiles {
  std::vector<formats::ExtraEntry> files{};

  std::vector<std::string> names() const;
  /// Returns `; 2 extra files, 30 bytes`; empty if there are none.
  std::string in_words() const;
  /// Writes the member `extra_files`, if there are any.
  void write(JsonOutput& json) const;
};
ExtraFiles find_extra_files(const formats::CheckpointReader& reader, const SourceOptions& options);

/// Returns the bytes of the data files that have further hard links, usually in other checkpoints.
/// Removing this checkpoint does not free these bytes. 0 for formats without base checkpoints.
std::uint64_t shared_nbytes(const formats::CheckpointReader& reader);
/// Writes the member `shared_nbytes`, unless it is 0.
void write_shared_nbytes(JsonOutput& json, const formats::CheckpointReader& reader);

inspect::Selection select_names(const formats::CheckpointReader& reader,
                                const SourceOptions& options);

/// As `select_names`, plus the tensors that the selected aliases are names of.
inspect::Selection select_with_tensors_of_aliases(const formats::CheckpointReader& reader,
                                                  const SourceOptions& options);

/// Throws Error(invalid_argument) if a pattern matches no name in A and none in B (perhaps a typo),
/// or if all patterns together select no name. Prints a note for each exclusion (`!GLOB`) that
/// matches no name. `renames` are applied to A's names first.
void require_patterns_used(const NameSelection& names, const formats::CheckpointReader& a,
                           const formats::CheckpointReader& b, const std::vector<Rename>& renames,
                           Terminal& terminal);

/// Progress and interruption of long work: shows how many bytes of tensors are done, and stops the
/// work after a signal.
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

/// Returns the format, the number of ranks if it has ranks, and notes on it: `native, 4 ranks`.
std::string format_in_words(const formats::CheckpointReader& reader);

/// A value's type and text, for a line of a table. The type is `refused` for a kind of value that
/// Tessera never reads (an object of a class), and `unreadable` if the value is missing or damaged;
/// the text is then the reason, so that a list can go on with the other values. Throws: Error(io).
struct ValueWords {
  std::string type;
  std::string text;
};
ValueWords value_in_words(const formats::CheckpointReader& reader, std::size_t value_index);

/// Returns a value as JSON; a refused value as `{"$refused": "<reason>"}`, a missing or damaged
/// value as `{"$unreadable": "<reason>"}`. Throws: Error(io).
std::string value_as_json(const formats::CheckpointReader& reader, std::size_t value_index);

/// Returns the totals in words: `3 tensors, 1 value`.
std::string counts_in_words(const inspect::Totals& totals);

}  // namespace tessera::cli
