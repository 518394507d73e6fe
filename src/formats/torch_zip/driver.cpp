#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "base/outside_failure.h"
#include "formats/drivers.h"
#include "formats/signatures.h"
#include "formats/torch_zip.h"
#include "formats/torch_zip/part_of_whole.h"
#include "formats/torch_zip/tar_members.h"
#include "formats/torch_zip/torch_stream.h"
#include "formats/zip/zip_reader.h"

namespace tessera::formats {
namespace {

constexpr std::array<std::string_view, 3> kSuffixes{".pt", ".pth", ".bin"};
constexpr std::string_view kPickleName = "/data.pkl";

/// Whether the first entry of an archive is not compressed and has a name that torch.save writes:
/// `<name>/data.pkl`, or for TorchScript `<name>/data/0`. Used for archives that were cut short,
/// because a zip archive is normally read from its end.
bool begins_as_torch_save(std::string_view begin) {
  constexpr std::size_t kMethodOffset = 8;
  constexpr std::size_t kNameLengthOffset = 26;
  constexpr std::size_t kNameOffset = 30;
  constexpr std::string_view kStorages = "/data/";
  if (begin.size() < kNameOffset || begin.substr(kMethodOffset, 2) != std::string_view("\0\0", 2)) {
    return false;
  }
  const auto length = static_cast<unsigned char>(begin[kNameLengthOffset]) +
                      std::size_t{static_cast<unsigned char>(begin[kNameLengthOffset + 1])} * 256;
  std::string_view name = begin.substr(kNameOffset, length);
  name.remove_prefix(std::min(name.find('/'), name.size()));
  if (name == kPickleName) return true;
  return name.starts_with(kStorages) && name.size() > kStorages.size() &&
         name.find_first_not_of("0123456789", kStorages.size()) == std::string_view::npos;
}

class TorchZipDriver final : public FormatDriver {
 public:
  Format format() const override { return Format::torch_zip; }

  FormatDescription description() const override {
    return {.title = "torch.save", .in_directory = "", .as_file = "a torch.save archive"};
  }

  FormatTraits traits() const override {
    return {.pieces = FormatTraits::Pieces::whole_tensors,
            .holds_annotations = false,
            .holds_dtensors = false};
  }

  Recognition recognize_directory(const DirectoryListing& directory) const override {
    const auto is_torch_save = [](const std::string& name) {
      return std::ranges::any_of(kSuffixes,
                                 [&](std::string_view suffix) { return name.ends_with(suffix); });
    };
    if (const auto form = torch_zip::form_of_directory(directory.names)) {
      return {Match::hint, Error(ErrorKind::unsupported, {.path = directory.path},
                                 "expected a checkpoint in one file or with an index, found " +
                                     *form + " (give the path of one file to look into it)")};
    }
    if (auto refusal = torch_zip::refusal_of_meta(directory.path, directory.names)) {
      return {Match::hint, std::move(refusal)};
    }
    if (std::ranges::none_of(directory.names, is_torch_save)) return {};
    return {Match::hint, Error(ErrorKind::unsupported, {.path = directory.path},
                               "expected a checkpoint, found a directory of torch.save files (give "
                               "the path of one file)")};
  }

  Recognition recognize_file(const FileBegin& file) const override {
    if (file.bytes.starts_with(detail::kZipSignature) || torch_zip::begins_as_stream(file.bytes) ||
        torch_zip::begins_as_tar(file.bytes)) {
      return {Match::certain};
    }
    return {};
  }

  std::unique_ptr<CheckpointReader> open(const FileSystem& fs,
                                         const std::string& path) const override {
    return open_torch_zip(fs, path);
  }
  std::unique_ptr<CheckpointReader> open_with_classes(
      const FileSystem& fs, const std::string& path,
      const std::vector<std::string>& as_dict) const override {
    return open_torch_zip_with_classes(fs, path, as_dict);
  }

  std::span<const std::string_view> file_suffixes() const override { return kSuffixes; }
  DestinationKind destination_kind(const std::string& /*destination*/) const override {
    return DestinationKind::file;
  }

  /// Returns whether the file is a stream, or an archive with the pickle that the reader needs; if
  /// the archive is damaged, whether it begins as one. False for tar archives: Tessera writes none.
  bool is_whole_file(const ReadableFile& file, std::string_view first_bytes) const override {
    if (torch_zip::begins_as_stream(first_bytes)) return true;
    try {
      const zip::ZipReader archive(file, {0, file.nbytes()});
      return std::ranges::any_of(archive.members(), [](const zip::Member& member) {
        return member.compression == zip::Compression::stored &&
               member.name.ends_with(kPickleName) &&
               member.name.find('/') == member.name.size() - kPickleName.size();
      });
    } catch (const Error& error) {
      if (tessera::detail::is_outside_failure(error)) throw;
      return begins_as_torch_save(first_bytes);
    }
  }
};

}  // namespace

const FormatDriver& torch_zip_driver() {
  static const TorchZipDriver driver;
  return driver;
}

}  // namespace tessera::formats
