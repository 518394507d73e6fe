#include <algorithm>
#include <array>

#include "formats/drivers.h"
#include "formats/file_names.h"
#include "formats/indexed_format_driver.h"
#include "formats/signatures.h"
#include "tessera/formats/native.h"

namespace tessera::formats {
namespace {

bool begins_as_native(std::string_view begin) {
  const std::string_view signature = detail::kNativeSignature;
  return begin.starts_with(signature) ||
         signature.starts_with(begin);  // the file may be shorter than the signature
}

constexpr std::array kNativeMarks{
    FileMark{".h5", "a file of a native checkpoint", detail::kNativeSignature, begins_as_native}};

/// Whether a name is like `base-0123456789abcdef-00003.h5`.
bool is_linked_name(std::string_view name) {
  constexpr std::string_view kBegin = "base-";
  constexpr std::size_t kNumDigits = 16;  // of a checkpoint id
  if (!name.starts_with(kBegin)) return false;
  name.remove_prefix(kBegin.size());
  return std::min(name.find_first_not_of("0123456789abcdef"), name.size()) == kNumDigits &&
         is_name_like(name.substr(kNumDigits), "-#.h5");
}

class NativeDriver final : public IndexedFormatDriver {
 public:
  Format format() const override { return Format::native; }

  FormatDescription description() const override {
    return {.title = "Tessera's own", .in_directory = "index.h5", .as_file = ""};
  }

  FormatTraits traits() const override {
    return {.is_written_in_parts = true,
            .has_compression = true,
            .has_base = true,
            .holds_dtensors = false};
  }

  Recognition recognize_directory(const DirectoryListing& directory) const override {
    if (directory.has("index.h5")) return {Match::certain};
    for (const std::string& name : directory.names) {
      if (!name.starts_with("rank-") || !name.ends_with(".h5")) continue;
      return {Match::remains,
              Error(ErrorKind::corruption, {.path = directory.path},
                    "index.h5: expected the index of a native checkpoint, found only rank files",
                    {Remedy::Action::rebuild_index})};
    }
    return {};
  }

  Recognition recognize_file(const FileBegin& file) const override {
    const auto refusal = [&](std::string_view what) {
      return Recognition{Match::certain, Error(ErrorKind::unsupported, {.path = file.path}, what)};
    };
    if (file.bytes.starts_with(detail::kNativeSignature)) {
      return refusal(
          "expected a checkpoint, found one file of a native checkpoint (give the path of its "
          "directory)");
    }
    if (detail::is_hdf5(file.bytes)) {
      return refusal("expected a checkpoint, found an HDF5 file that Tessera did not write");
    }
    return {};
  }

  std::unique_ptr<CheckpointReader> open(const FileSystem& fs,
                                         const std::string& path) const override {
    return open_native(fs, path);
  }

  bool may_own_file(std::string_view name) const override { return writes_file(name); }
  bool writes_file(std::string_view name) const override {
    return name == "index.h5" || is_name_like(name, "rank-#.h5") || is_linked_name(name);
  }
  std::span<const FileMark> file_marks() const override { return kNativeMarks; }
  std::string_view index_name() const override { return "index.h5"; }
};

}  // namespace

const FormatDriver& native_driver() {
  static const NativeDriver driver;
  return driver;
}

}  // namespace tessera::formats
