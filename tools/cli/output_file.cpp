#include "cli/output_file.h"

#include <optional>
#include <span>

#include "tessera/base/error.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kBufferNbytes = std::size_t{1} << 20;

// Checks the path as StagedDestination does, but earlier and with a message that names the option.
// Returns the path.
const std::string& checked(const FileSystem& fs, const std::string& path, OverwritePolicy overwrite,
                           std::string_view option) {
  const std::optional<FileKind> kind = fs.kind_of(path);
  if (kind && *kind != FileKind::regular) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = path}, option, "a file",
                          *kind == FileKind::directory ? "a directory" : "a device, pipe or socket",
                          "it was not changed");
  }
  if (kind && overwrite == OverwritePolicy::refuse) {
    throw Error(ErrorKind::already_exists, {.path = path},
                "the file exists (--overwrite replaces it)");
  }
  return path;
}

}  // namespace

OutputFile::OutputFile(FileSystem& fs, const std::string& path, OverwritePolicy overwrite,
                       std::string_view option)
    : staged_(fs, checked(fs, path, overwrite, option), DestinationKind::file, overwrite),
      file_(fs.open_for_update(staged_.staging_path())) {}

void OutputFile::write(std::string_view text) {
  buffer_ += text;
  if (buffer_.size() >= kBufferNbytes) flush();
}

void OutputFile::flush() {
  file_->write_at(flushed_nbytes_, std::as_bytes(std::span(buffer_)));
  flushed_nbytes_ += buffer_.size();
  buffer_.clear();
}

void OutputFile::commit() {
  flush();
  file_->sync();
  file_->close();
  staged_.commit();
}

}  // namespace tessera::cli
