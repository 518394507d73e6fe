#include "tessera/formats/parts.h"

#include <utility>

#include "tessera/base/error.h"
#include "tessera/formats/format_driver.h"
#include "tessera/formats/format_writer.h"

namespace tessera::formats {
namespace {

const PartsWriter& parts_writer(const std::string& directory, Format format) {
  if (const PartsWriter* parts = writer_of(format).parts()) return *parts;
  throw Error::expected(
      ErrorKind::unsupported, {.path = directory}, "format to be written in parts",
      writable_formats_in_words([](const FormatTraits& of) { return of.is_written_in_parts; }),
      format.name());
}

}  // namespace

std::unique_ptr<CheckpointWriter> create_part(FileSystem& fs, std::string directory,
                                              CheckpointContents contents,
                                              std::vector<Value> values, int rank,
                                              const PartOptions& options) {
  if (rank < 0 || rank >= contents.world_size) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = directory}, "rank of a part",
                          "less than " + std::to_string(contents.world_size), std::to_string(rank));
  }
  const PartsWriter& parts = parts_writer(directory, options.format);
  return parts.create_part(fs, std::move(directory), std::move(contents), std::move(values), rank,
                           options);
}

std::uint64_t join_parts(const FileSystem& fs, const std::string& directory,
                         const CheckpointContents& contents, const std::vector<Value>& values,
                         const PartOptions& options) {
  return parts_writer(directory, options.format)
      .join_parts(fs, directory, contents, values, options);
}

void seal_part(FileSystem& fs, const std::string& directory, int rank, std::uint64_t token,
               const PartOptions& options) {
  parts_writer(directory, options.format).seal_part(fs, directory, rank, token);
}

void finish_parts(FileSystem& fs, const std::string& directory, const CheckpointContents& contents,
                  const std::vector<Value>& values, const PartOptions& options) {
  parts_writer(directory, options.format).finish_parts(fs, directory, contents, values);
}

}  // namespace tessera::formats
