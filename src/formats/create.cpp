#include "tessera/formats/create.h"

#include <string_view>
#include <utility>

#include "base/named_object.h"
#include "base/outside_failure.h"
#include "base/utf8.h"
#include "formats/source_overlap.h"
#include "formats/staging/replaceable.h"
#include "formats/staging/staged_destination.h"
#include "object_store/url.h"
#include "tessera/base/error.h"
#include "tessera/formats/format_writer.h"

namespace tessera::formats {
namespace {

/// Returns `path` with its links resolved. If nothing exists at `path`, resolves only the links of
/// its parent directory. Returns the path of a pipe or other special file as it is, because such a
/// file may have no resolved path.
std::string resolved(const FileSystem& fs, const std::string& path) {
  const auto kind = fs.kind_of(path);
  if (kind == FileKind::other) return path;
  if (kind) return fs.resolve_links(path);
  const std::string parent = directory_of(path);
  return fs.kind_of(parent) ? fs.resolve_links(parent) + "/" + last_component(path) : path;
}

bool is_replaceable(const FileSystem& fs, const std::string& path, const std::string& option,
                    const std::vector<ExtraFile>& extra_files) {
  try {
    check_replaceable(fs, path, option, extra_files);
    return true;
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    return false;
  }
}

}  // namespace

DeviceMeshOptions DeviceMeshOptions::parse(std::string_view text) {
  const auto refuse = [&]() {
    return Error::expected(ErrorKind::invalid_argument, {}, "device mesh",
                           "a type of device and names of axes, such as cuda:fsdp, "
                           "cuda:ddp,fsdp or cpu",
                           printable(text));
  };
  const std::size_t colon = text.find(':');
  DeviceMeshOptions mesh{std::string(text.substr(0, colon)), {}};
  if (mesh.device_type.empty() || !tessera::detail::is_valid_utf8(text)) throw refuse();
  std::string_view names = colon == text.npos ? std::string_view() : text.substr(colon + 1);
  if (colon != text.npos && names.empty()) throw refuse();
  while (!names.empty()) {
    const std::size_t comma = names.find(',');
    mesh.dim_names.emplace_back(names.substr(0, comma));
    if (mesh.dim_names.back().empty() || comma + 1 == names.size()) throw refuse();
    names = comma == names.npos ? std::string_view() : names.substr(comma + 1);
  }
  return mesh;
}

std::unique_ptr<CheckpointWriter> create_checkpoint(FileSystem& fs, const std::string& destination,
                                                    CheckpointContents contents,
                                                    std::vector<Value> values,
                                                    const CreateOptions& options) {
  return writer_of(options.format)
      .start(fs, destination, std::move(contents), std::move(values), options);
}

void check_staging(FileSystem& fs, const std::string& destination,
                   const CheckpointContents& contents, const std::vector<Value>& values,
                   const CreateOptions& options) {
  writer_of(options.format).check_staging(fs, destination, contents, values, options);
}

void require_apart(const FileSystem& fs, const std::string& source,
                   const std::string& destination) {
  const std::string from = resolved(fs, source) + "/";
  const std::string to = resolved(fs, destination) + "/";
  if (from != to && (from.starts_with(to) || to.starts_with(from))) {
    throw Error::expected(
        ErrorKind::invalid_argument, {.path = destination}, "destination",
        "a path that is not inside the source and does not contain it",
        from.starts_with(to) ? "a folder that contains the source" : "a path inside the source");
  }
  if (from == to && object_store::is_url(destination)) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = destination}, "destination",
                          "a URL other than that of the source", "the same URL",
                          "a store replaces a checkpoint file by file, so an interruption would "
                          "lose the old one and the new one; write to another URL");
  }
  const std::string staging = StagedDestination::staging_path_of(to) + "/";
  if (from.starts_with(staging)) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = source}, "source",
                          "a path other than DST.partial, which is needed while DST is written",
                          "DST.partial, or a path inside it", "rename it first");
  }
}

void check_destination(const FileSystem& fs, const std::string& source,
                       const std::string& destination, OverwritePolicy overwrite,
                       const std::string& option, const std::vector<ExtraFile>& extra_files) {
  require_apart(fs, source, destination);
  tessera::detail::require_storage(without_trailing_slashes(destination));
  tessera::detail::require_no_dangling_link(without_trailing_slashes(destination));
  if (!fs.kind_of(destination)) return;
  if (overwrite == OverwritePolicy::refuse) {
    if (object_store::is_url(destination) && is_interrupted_write(destination, extra_files)) {
      refuse_interrupted_write(destination);
    }
    const std::string what =
        is_replaceable(fs, destination, option, extra_files)
            ? " replaces it)"
            : " replaces only a checkpoint that Tessera can write, and no other files)";
    throw Error(ErrorKind::already_exists, {.path = destination},
                "the destination exists (" + option + what);
  }
  check_replaceable(fs, destination, option, extra_files);
}

}  // namespace tessera::formats
