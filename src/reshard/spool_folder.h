#pragma once

#include <string>

namespace tessera::reshard {

/// Makes the folder in which the files for a URL are written before they are uploaded, and returns
/// its path. It is in `parent`, or else in TMPDIR or /tmp. The path is the same in each run, so
/// that a run removes what an interrupted one left. Only this user can use it. Throws: Error(io);
/// Error(already_exists) if something else has the name.
std::string make_spool_folder(const std::string& parent, const std::string& url);

}  // namespace tessera::reshard
