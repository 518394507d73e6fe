#include <algorithm>
#include <array>
#include <iterator>
#include <set>

#include "base/json.h"
#include "base/outside_failure.h"
#include "formats/drivers.h"
#include "formats/file_names.h"
#include "formats/safetensors/header.h"
#include "formats/safetensors/metadata_keys.h"
#include "formats/safetensors/shard_names.h"
#include "formats/safetensors/values_file.h"
#include "formats/staging/replaceable.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/safetensors.h"

namespace tessera::formats {
namespace {

using detail::index_among;
using detail::kIndexSuffix;
using detail::kShardNaming;

constexpr std::array<std::string_view, 1> kSuffixes{".safetensors"};

std::uint64_t header_length(std::string_view begin) {
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < detail::kHeaderLengthNbytes; ++i) {
    length |= std::uint64_t{static_cast<unsigned char>(begin[i])} << (8 * i);
  }
  return length;
}

bool begins_as_safetensors(std::string_view begin) {
  constexpr std::size_t kLengthNbytes = detail::kHeaderLengthNbytes;
  return begin.size() >= kLengthNbytes && header_length(begin) <= detail::kMaxHeaderNbytes &&
         (begin.size() == kLengthNbytes || begin[kLengthNbytes] == '{');
}

bool begins_as_json_object(std::string_view begin) {
  return begin.substr(std::min(begin.find_first_not_of(" \t\r\n"), begin.size())).starts_with('{');
}

constexpr std::array kSafetensorsMarks{
    FileMark{".safetensors", "safetensors", {}, begins_as_safetensors},
    FileMark{kIndexSuffix, "an index of safetensors", {}, begins_as_json_object},
    FileMark{detail::kValuesSuffix, "values of a checkpoint", {}, detail::begins_as_values_file},
};

/// Returns the names of the files that an index names. The set is empty if the index is damaged.
std::set<std::string> files_of_index(const FileSystem& fs, const std::string& index_path) {
  std::set<std::string> names;
  try {
    const Value index =
        parse_json(read_file(fs, index_path, detail::ShardIndex::kMaxNbytes), index_path);
    const Value* weight_map = index.find("weight_map");
    const auto* entries = weight_map == nullptr ? nullptr : weight_map->get_if<Value::Dict>();
    if (entries == nullptr) return names;
    for (const auto& [tensor, item] : *entries) {
      if (const auto* name = item.get_if<std::string>()) names.insert(*name);
    }
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
  }
  return names;
}

/// Whether a file has the name of a values file, but Tessera did not write it.
bool is_foreign_values_file(const FileSystem& fs, const std::string& directory,
                            const std::string& name) {
  return name.ends_with(detail::kValuesSuffix) &&
         !detail::may_be_values_file(fs, join_path(directory, name));
}

/// Returns those of `names` that belong to the checkpoint of an index: the index, its values file,
/// and the files that it names or, if it is damaged, the files of its series.
std::vector<std::string> names_of_index(const FileSystem& fs, const std::string& directory,
                                        const std::string& index,
                                        const std::vector<std::string>& names) {
  const std::string model = index.substr(0, index.size() - kIndexSuffix.size());
  const std::string values = detail::values_path_of(model + ".safetensors");
  const std::set<std::string> named = files_of_index(fs, join_path(directory, index));
  std::vector<std::string> own;
  std::ranges::copy_if(names, std::back_inserter(own), [&](const std::string& name) {
    const auto place = detail::place_in_series(name);
    return (name == index || name == values || named.contains(name) ||
            (named.empty() && place && place->series == model + "-")) &&
           !is_foreign_values_file(fs, directory, name);
  });
  return own;
}

/// The values file beside a single `.safetensors` file.
class ValuesFile final : public SideFiles {
 public:
  std::optional<std::string> named_by(const FileSystem& fs,
                                      const std::string& path) const override {
    std::string values = detail::values_path_of(path);
    return detail::names_values(fs, path, values) ? std::optional(std::move(values)) : std::nullopt;
  }

  std::optional<std::string> left_beside(const FileSystem& fs,
                                         const std::string& path) const override {
    std::string values = detail::values_path_of(path);
    // Beside a checkpoint of another format, a file with this name may be a user's own.
    const bool may_tell = fs.kind_of(path) == FileKind::regular &&
                          detail::is_values_file(fs, values) &&
                          detect_format(fs, path) == Format::safetensors;
    if (!may_tell || detail::names_values(fs, path, values)) return std::nullopt;
    return values;
  }

  void restore(FileSystem& fs, const std::string& path) const override {
    detail::put_back_replaced_values(fs, path);
  }

  void remove(FileSystem& fs, const std::string& path) const noexcept override {
    detail::remove_values_beside(fs, path);
  }

  void remove_orphans(FileSystem& fs, const std::string& path) const override {
    const std::string values = detail::values_path_of(path);
    if (path.ends_with(".safetensors") && detail::is_values_file(fs, values)) fs.remove_all(values);
  }
};

class SafetensorsDriver final : public FormatDriver {
 public:
  Format format() const override { return Format::safetensors; }

  FormatDescription description() const override {
    return {.title = "safetensors", .in_directory = "*.safetensors", .as_file = "safetensors"};
  }

  FormatTraits traits() const override {
    return {.pieces = FormatTraits::Pieces::whole_tensors,
            .has_own_aliases = true,
            .holds_key_order = false,
            .own_annotation = "format=pt",  // Tessera's writer sets it
            .has_several_files = true,
            .holds_dtensors = false};
  }

  Recognition recognize_directory(const DirectoryListing& directory) const override {
    const bool has_any = std::ranges::any_of(directory.names, [](const std::string& name) {
      return name.ends_with(".safetensors") || name.ends_with(kIndexSuffix);
    });
    return {has_any ? Match::by_name : Match::none};
  }

  Recognition recognize_file(const FileBegin& file) const override {
    if (file.path.ends_with(kIndexSuffix)) {
      return {begins_as_json_object(file.bytes) ? Match::certain : Match::by_name};
    }
    constexpr std::size_t kLengthNbytes = detail::kHeaderLengthNbytes;
    const bool has_header = file.bytes.size() > kLengthNbytes && file.bytes[kLengthNbytes] == '{';
    return {has_header || file.path.ends_with(".safetensors") ? Match::by_name : Match::none};
  }

  std::unique_ptr<CheckpointReader> open(const FileSystem& fs,
                                         const std::string& path) const override {
    return open_safetensors(fs, path);
  }

  std::optional<std::uint64_t> nbytes_from_begin(const ReadableFile& file) const override {
    return safetensors_nbytes(file);
  }

  std::span<const std::string_view> file_suffixes() const override { return kSuffixes; }
  DestinationKind destination_kind(const std::string& destination) const override {
    return destination.ends_with(".safetensors") ? DestinationKind::file
                                                 : DestinationKind::directory;
  }

  bool may_own_file(std::string_view name) const override {
    return name.ends_with(".safetensors") || name.ends_with(kIndexSuffix) ||
           name.ends_with(detail::kValuesSuffix);
  }
  bool writes_file(std::string_view name) const override {
    return std::ranges::any_of(
        std::array{"model.safetensors", "model-#-of-#.safetensors", "model.safetensors.index.json",
                   "model.safetensors.values.json", "adapter_model.safetensors",
                   "adapter_model-#-of-#.safetensors", "adapter_model.safetensors.index.json",
                   "adapter_model.safetensors.values.json"},
        [&](std::string_view pattern) { return is_name_like(name, pattern); });
  }
  /// Returns the names of the checkpoint's own files. Leaves out, as extra files: tensor files that
  /// the index does not name; values files that belong to no tensor file; values files that Tessera
  /// did not write.
  std::vector<std::string> own_files(const FileSystem& fs, const std::string& directory,
                                     const std::vector<std::string>& names,
                                     const std::set<std::string>& opened) const override {
    if (const auto index = index_among(names, kShardNaming)) {
      return names_of_index(fs, directory, *index, names);
    }
    std::set<std::string> values;
    for (const std::string& name : names) values.insert(detail::values_path_of(name));
    std::vector<std::string> own = FormatDriver::own_files(fs, directory, names, opened);
    std::erase_if(own, [&](const std::string& name) {
      return name.ends_with(detail::kValuesSuffix) &&
             (!values.contains(name) || is_foreign_values_file(fs, directory, name));
    });
    return own;
  }
  std::span<const FileMark> file_marks() const override { return kSafetensorsMarks; }

  /// If the header is longer than the file, accepts the file only if its name ends in
  /// `.safetensors`: it is then a safetensors file that was cut short.
  bool is_whole_file(const ReadableFile& file, std::string_view first_bytes) const override {
    return begins_as_safetensors(first_bytes) &&
           (file.path().ends_with(".safetensors") ||
            header_length(first_bytes) <= file.nbytes() - detail::kHeaderLengthNbytes);
  }

  bool is_one_of_several(const FileSystem& fs, const std::string& path) const override {
    return detail::is_one_of_several(fs, path, kShardNaming,
                                     [&](const std::string& index_path, const std::string& name) {
                                       return files_of_index(fs, index_path).contains(name);
                                     });
  }

  /// Checks that the files belong to one checkpoint: the index must name them. If there is no
  /// index, opens them as one checkpoint.
  void require_one_checkpoint(const FileSystem& fs, const std::string& directory,
                              const std::vector<std::string>& names,
                              const std::string& option) const override {
    if (const auto index = index_among(names, kShardNaming)) {
      const std::vector<std::string> own = names_of_index(fs, directory, *index, names);
      const auto foreign = std::ranges::find_if(names, [&](const std::string& name) {
        return std::ranges::find(own, name) == own.end();
      });
      if (foreign != names.end()) refuse_foreign_file(directory, *foreign, option);
      return;
    }
    if (names.size() < 2) return;
    try {
      open_safetensors(fs, directory);
    } catch (const Error& error) {
      if (tessera::detail::is_outside_failure(error)) throw;
      refuse_to_replace(directory, option, "the files of one checkpoint",
                        "files that do not belong together: " + std::string(error.what()));
    }
  }

  const SideFiles* side_files() const override {
    static const ValuesFile values;
    return &values;
  }
};

}  // namespace

const FormatDriver& safetensors_driver() {
  static const SafetensorsDriver driver;
  return driver;
}

}  // namespace tessera::formats
