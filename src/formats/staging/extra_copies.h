#pragma once

#include <set>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/create.h"

namespace tessera::formats {

/// Returns the state of the file at `path`, in words: its size and the time of its last change. If
/// `path` is not a regular file, returns what it is, such as a link. Returns "not there" if nothing
/// is there.
std::string file_state(const std::string& path);

/// Whether the two paths are regular files, not links, with the same bytes.
bool have_equal_bytes(const FileSystem& fs, const std::string& path, const std::string& other);
/// Whether `path` is a regular file, not a link, and equal to a copy of the extra file `file`.
bool holds_copy(const FileSystem& fs, const std::string& path, const ExtraFile& file);

/// Throws Error(corruption) if the extra file is not in its state `file.state` (empty: no check).
void require_unchanged(const ExtraFile& file);

/// Copies an extra file to `path`, where nothing may exist, and syncs the copy. Throws:
/// Error(corruption) if another program has changed the extra file since it was listed; Error(io).
void copy_extra_file(FileSystem& fs, const ExtraFile& file, const std::string& path);

std::set<std::string> names_of(const std::vector<ExtraFile>& files);

/// Returns the part of a run's resume identity that describes the extra files: their names and
/// states.
ResumeIdentity identify_extra_files(const std::vector<ExtraFile>& files);
/// Returns the names of the extra files that a resume identity describes.
std::set<std::string> extra_names_in(const ResumeIdentity& identity);

}  // namespace tessera::formats
