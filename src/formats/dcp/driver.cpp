#include <algorithm>
#include <array>

#include "formats/dcp.h"
#include "formats/dcp/metadata.h"
#include "formats/drivers.h"
#include "formats/file_names.h"
#include "formats/indexed_format_driver.h"
#include "formats/signatures.h"

namespace tessera::formats {
namespace {

/// Returns whether `begin` can be the first bytes of a `.metadata` file: a pickle, of any protocol,
/// that begins with the module of DCP's classes.
bool begins_as_metadata(std::string_view begin) {
  return begin.find("torch.distributed.checkpoint.metadata") != std::string_view::npos;
}

/// Returns whether `begin` can be the first bytes of a `.distcp` file. Tessera may write any number
/// of zero bytes before the first item, to align large storages to pages.
bool begins_as_item(std::string_view begin) {
  constexpr char kPickleProtocol = '\x80';
  begin.remove_prefix(std::min(begin.find_first_not_of('\0'), begin.size()));
  return begin.starts_with(detail::kZipSignature) || detail::kZipSignature.starts_with(begin) ||
         begin.starts_with(kPickleProtocol);
}

constexpr std::array kDcpMarks{
    FileMark{".metadata", "metadata of a checkpoint", {}, begins_as_metadata},
    FileMark{".distcp", "items of a distributed checkpoint", {}, begins_as_item},
};

class DcpDriver final : public IndexedFormatDriver {
 public:
  Format format() const override { return Format::dcp; }

  FormatDescription description() const override {
    return {.title = "PyTorch's distributed checkpoint (DCP)",
            .in_directory = ".metadata",
            .as_file = ""};
  }

  FormatTraits traits() const override {
    return {.pieces = FormatTraits::Pieces::boxes,
            .holds_aliases = false,
            .holds_flat_units = false,
            .holds_key_types = false,
            .holds_list_roots = false,
            .holds_annotations = false,
            .is_written_in_parts = true};
  }

  Recognition recognize_directory(const DirectoryListing& directory) const override {
    if (directory.has(".metadata")) return {Match::certain};
    const auto has = [&](auto matches) { return std::ranges::any_of(directory.names, matches); };
    if (has([](const std::string& name) {
          return name.starts_with("__") && name.ends_with(".metadata");
        })) {
      return {Match::remains, Error(ErrorKind::unsupported, {.path = directory.path},
                                    ".metadata: expected one file for all ranks, found one for "
                                    "each rank (saved with use_collectives=False; give the path of "
                                    "one of these files, to read what that rank saved)")};
    }
    if (has([](const std::string& name) { return name.ends_with(".distcp"); })) {
      return {Match::remains, Error(ErrorKind::corruption, {.path = directory.path},
                                    ".metadata: expected this file next to the .distcp files, "
                                    "found none (was the save interrupted?)")};
    }
    return {};
  }

  Recognition recognize_file(const FileBegin& file) const override {
    if (is_name_like(last_component(file.path), dcp::kMetadataOfOneRank)) return {Match::certain};
    const bool is_item = file.path.ends_with(".distcp");
    if (!is_item && !file.path.ends_with(".metadata")) return {};
    const bool is_zip = is_item && file.bytes.starts_with(detail::kZipSignature);
    return {is_zip ? Match::certain : Match::hint,
            Error(ErrorKind::unsupported, {.path = file.path},
                  "expected a checkpoint, found one file of a distributed checkpoint (give the "
                  "path of its directory)")};
  }

  std::unique_ptr<CheckpointReader> open(const FileSystem& fs,
                                         const std::string& path) const override {
    return open_dcp(fs, path);
  }
  std::unique_ptr<CheckpointReader> open_with_classes(
      const FileSystem& fs, const std::string& path,
      const std::vector<std::string>& as_dict) const override {
    return open_dcp_with_classes(fs, path, as_dict);
  }

  bool may_own_file(std::string_view name) const override {
    return name == ".metadata" || is_name_like(name, dcp::kMetadataOfOneRank) ||
           name.ends_with(".distcp");
  }
  bool writes_file(std::string_view name) const override {
    return name == ".metadata" || is_name_like(name, "__#_#.distcp");
  }
  std::span<const FileMark> file_marks() const override { return kDcpMarks; }
  std::string_view index_name() const override { return ".metadata"; }
};

}  // namespace

const FormatDriver& dcp_driver() {
  static const DcpDriver driver;
  return driver;
}

}  // namespace tessera::formats
