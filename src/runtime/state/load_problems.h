#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::state {

/// Throws Error(mismatch) that lists all problems, a line each, and behind them the hints; nothing
/// where there are no problems.
void refuse_problems(const std::string& what, const std::vector<formats::Finding>& problems,
                     const std::vector<std::string>& hints = {});

/// Throws an error that another rank has told of: its text, line by line.
[[noreturn]] void rethrow_text(ErrorKind kind, std::string_view text);

}  // namespace tessera::state
