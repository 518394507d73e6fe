#pragma once

#include <string>

#include "tessera/base/value.h"

namespace tessera::cli {

/// Reads the JSON that one of several processes printed with `--json --part I/N`. `verb` and
/// `subject` say what is expected, for messages: `stats`, `part of statistics`.
/// Throws: Error(corruption) naming the file; Error(io).
Value read_part_document(const std::string& path, const std::string& subject,
                         const std::string& verb);

/// Throws: UsageError if `--part` is not with `--json`.
void require_json_of_part(bool json, const std::string& help_command);

}  // namespace tessera::cli
