#include "tessera/formats/parts.h"

#include <utility>

#include "formats/dcp/parts.h"
#include "formats/native/parts.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

[[noreturn]] void refuse_format(const std::string& directory, Format format) {
  throw Error::expected(ErrorKind::unsupported, {.path = directory},
                        "format to be written in parts", "native or dcp", format_name(format));
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
  switch (options.format) {
    case Format::native:
      return native::create_part(fs, std::move(directory), std::move(contents), values, rank,
                                 options.native);
    case Format::dcp:
      return dcp::create_part(fs, std::move(directory), std::move(contents), std::move(values),
                              rank);
    case Format::safetensors:
    case Format::torch_zip:
      break;
  }
  refuse_format(directory, options.format);
}

std::uint64_t join_parts(const FileSystem& fs, const std::string& directory,
                         const CheckpointContents& contents, const std::vector<Value>& values,
                         const PartOptions& options) {
  switch (options.format) {
    case Format::native:
      return native::join_parts(fs, directory, contents, values, options.native);
    case Format::dcp:
      dcp::require_parts(fs, directory, contents, values);
      return 0;
    case Format::safetensors:
    case Format::torch_zip:
      break;
  }
  refuse_format(directory, options.format);
}

void seal_part(FileSystem& fs, const std::string& directory, int rank, std::uint64_t token,
               const PartOptions& options) {
  switch (options.format) {
    case Format::native:
      return native::seal_part(fs, directory, rank, token);
    case Format::dcp:
      return;
    case Format::safetensors:
    case Format::torch_zip:
      break;
  }
  refuse_format(directory, options.format);
}

void finish_parts(FileSystem& fs, const std::string& directory, const CheckpointContents& contents,
                  const std::vector<Value>& values, const PartOptions& options) {
  switch (options.format) {
    case Format::native:
      return rebuild_native_index(fs, directory);
    case Format::dcp:
      return dcp::finish_parts(fs, directory, contents, values);
    case Format::safetensors:
    case Format::torch_zip:
      break;
  }
  refuse_format(directory, options.format);
}

}  // namespace tessera::formats
