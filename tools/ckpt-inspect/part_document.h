#pragma once

#include <map>
#include <string>

#include "cli/json_output.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::cli {

/// Reads the JSON that one of several processes printed with `--json --part I/N`. `subject` and
/// `verb` say what is expected, for messages: `part of statistics`, `stats`.
/// Throws: Error(corruption) naming the file; Error(io).
Value read_part_document(const std::string& path, const std::string& subject,
                         const std::string& verb);

/// The states of a checkpoint's data files in words (size and time of change), by their names in
/// the checkpoint.
using PartFiles = std::map<std::string, std::string>;

/// Returns the present states of a checkpoint's data files. Throws: Error(io).
PartFiles files_of_part(const formats::CheckpointReader& reader);

/// Writes the member `files`, which `require_files` compares. Get the states before you read the
/// elements, so that a change during the read is noticed.
void write_files_of_part(JsonOutput& json, const PartFiles& files);

/// Returns a digest of the files' names and states, 32 hex digits. For documents that have no room
/// for a list of files.
std::string digest_of_files(const PartFiles& files);

/// Checks that the part at `path` was made of these files in these states, so that all parts that
/// are joined come from the checkpoint that is open. Throws: Error(corruption) if the part does not
/// name its files; Error(mismatch) naming a data file that has changed.
void require_files(const Value& document, const std::string& path, const PartFiles& expected);

/// Call it only if `--part` is given. Throws: UsageError if `json` is false.
void require_json_of_part(bool json, const std::string& help_command);

}  // namespace tessera::cli
