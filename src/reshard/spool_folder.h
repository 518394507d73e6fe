#pragma once

#include <string>

namespace tessera::reshard {

/// Makes the folder in which the files for a URL are written before they are uploaded, and returns
/// its path. The folder is in `parent`; if that is empty, in TMPDIR or /tmp. Only this user can use
/// it. The path is the same in each run, so that a run finds what an interrupted run has left. Also
/// removes what killed processes left in other spools a day ago or earlier.
/// Throws: Error(io); Error(already_exists) if the name is taken by a file or by another user's
/// folder; Error(invalid_argument) if the URL does not end in a name.
std::string make_spool_folder(const std::string& parent, const std::string& url);

}  // namespace tessera::reshard
