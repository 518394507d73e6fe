#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/checkpoint_files.h"
#include "formats/safetensors/header.h"
#include "formats/safetensors/shard_names.h"
#include "formats/safetensors/values_file.h"
#include "formats/signatures.h"
#include "formats/zip/zip_reader.h"
#include "tessera/base/error.h"
#include "tessera/base/json.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/safetensors.h"

namespace tessera::formats {
namespace {

constexpr std::string_view kPickleName = "/data.pkl";
constexpr std::string_view kWayOut = "nothing is removed; if nobody needs it, remove it yourself";

bool begins_as_native(std::string_view head) {
  const std::string_view signature = detail::kNativeSignature;
  return head.starts_with(signature) || signature.starts_with(head);  // cut short
}

std::uint64_t header_length(std::string_view head) {
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < detail::kHeaderLengthNbytes; ++i) {
    length |= std::uint64_t{static_cast<unsigned char>(head[i])} << (8 * i);
  }
  return length;
}

bool begins_as_safetensors(std::string_view head) {
  constexpr std::size_t kLengthNbytes = detail::kHeaderLengthNbytes;
  return head.size() >= kLengthNbytes && header_length(head) <= detail::kMaxHeaderNbytes &&
         (head.size() == kLengthNbytes || head[kLengthNbytes] == '{');
}

bool begins_as_json_object(std::string_view head) {
  return head.substr(std::min(head.find_first_not_of(" \t\r\n"), head.size())).starts_with('{');
}

/// Whatever protocol it was pickled by, the first thing in it is the class.
bool begins_as_dcp_metadata(std::string_view head) {
  return head.find("torch.distributed.checkpoint.metadata") != std::string_view::npos;
}

/// Whether the first entry of an archive has a name of torch.save's: `<name>/data.pkl`, or under
/// TorchScript `<name>/data/0`, and is stored. For archives whose end is lost.
bool begins_as_torch_save(std::string_view head) {
  constexpr std::size_t kMethodOffset = 8;
  constexpr std::size_t kNameLengthOffset = 26;
  constexpr std::size_t kNameOffset = 30;
  constexpr std::string_view kStorages = "/data/";
  if (head.size() < kNameOffset || head.substr(kMethodOffset, 2) != std::string_view("\0\0", 2)) {
    return false;
  }
  const auto length = static_cast<unsigned char>(head[kNameLengthOffset]) +
                      std::size_t{static_cast<unsigned char>(head[kNameLengthOffset + 1])} * 256;
  std::string_view name = head.substr(kNameOffset, length);
  name.remove_prefix(std::min(name.find('/'), name.size()));
  if (name == kPickleName) return true;
  return name.starts_with(kStorages) && name.size() > kStorages.size() &&
         name.find_first_not_of("0123456789", kStorages.size()) == std::string_view::npos;
}

/// Zeros before the first item, of any number, are ours: they put large storages on pages.
bool begins_as_dcp_item(std::string_view head) {
  constexpr char kPickleProtocol = '\x80';
  head.remove_prefix(std::min(head.find_first_not_of('\0'), head.size()));
  return head.starts_with(detail::kZipSignature) || detail::kZipSignature.starts_with(head) ||
         head.starts_with(kPickleProtocol);
}

/// What a file of a checkpoint is, and how it begins.
struct Mark {
  std::string_view name_end;
  std::string_view in_words;
  bool (*is_at_begin)(std::string_view head);
};

constexpr std::array kMarks{
    Mark{".h5", "a file of a native checkpoint", begins_as_native},
    Mark{".safetensors", "safetensors", begins_as_safetensors},
    Mark{detail::kIndexSuffix, "an index of safetensors", begins_as_json_object},
    Mark{".values.json", "values of a checkpoint", detail::begins_as_values_file},
    Mark{".metadata", "metadata of a checkpoint", begins_as_dcp_metadata},
    Mark{".distcp", "items of a distributed checkpoint", begins_as_dcp_item},
};

std::string_view found_in_words(std::string_view head) {
  if (detail::is_hdf5(head)) return "an HDF5 file that Tessera did not write";
  if (head.starts_with(detail::kNativeSignature)) return kMarks[0].in_words;
  if (head.starts_with(detail::kZipSignature)) return "another zip archive";
  return "something else";
}

[[noreturn]] void refuse(const std::string& path, const std::string& option,
                         std::string_view expected, std::string_view found) {
  throw Error::expected(ErrorKind::invalid_argument, {.path = path}, option, expected, found,
                        kWayOut);
}

std::string read_head(const FileSystem& fs, const std::string& path) {
  return read_begin(fs, path, detail::kLookedAtNbytes).value_or("");
}

/// Throws where a file of a directory does not begin as its name says. An empty one does.
void require_mark(const FileSystem& fs, const std::string& path, const std::string& option) {
  const std::string head = read_head(fs, path);
  if (head.empty()) return;
  const auto* mark = std::ranges::find_if(
      kMarks, [&](const Mark& of_name) { return path.ends_with(of_name.name_end); });
  if (mark == kMarks.end() || mark->is_at_begin(head)) return;
  refuse(path, option, mark->in_words, found_in_words(head));
}

/// Whether a zip archive has a pickle where torch.save puts it, as the reader asks of it.
bool is_torch_save(const ReadableFile& file, std::string_view head) {
  try {
    const zip::ZipReader archive(file, {0, file.nbytes()});
    return std::ranges::any_of(archive.members(), [](const zip::Member& member) {
      return member.compression == zip::Compression::stored && member.name.ends_with(kPickleName) &&
             member.name.find('/') == member.name.size() - kPickleName.size();
    });
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::io) throw;
    return begins_as_torch_save(head);
  }
}

/// A header that is longer than the file is taken for one that was cut short where the name says
/// so, too.
bool is_safetensors(const ReadableFile& file, std::string_view head) {
  return begins_as_safetensors(head) &&
         (file.path().ends_with(".safetensors") ||
          header_length(head) <= file.nbytes() - detail::kHeaderLengthNbytes);
}

/// Throws where a single file is not of its format by what it holds. An empty one is.
void require_single_file(const FileSystem& fs, const std::string& path, Format format,
                         const std::string& option) {
  const std::string head = read_head(fs, path);
  if (head.empty()) return;
  const auto file = fs.open(path);
  const bool is_zip = format == Format::torch_zip;
  if (is_zip ? is_torch_save(*file, head) : is_safetensors(*file, head)) return;
  refuse(path, option, is_zip ? "an archive of torch.save" : "safetensors", found_in_words(head));
}

/// Returns the files that an index names; none where it is damaged.
std::set<std::string> files_of_index(const FileSystem& fs, const std::string& index_path) {
  std::set<std::string> names;
  try {
    const Value index = parse_json(read_file(fs, index_path, detail::kMaxIndexNbytes), index_path);
    const Value* weight_map = index.find("weight_map");
    const auto* entries = weight_map == nullptr ? nullptr : weight_map->get_if<Value::Dict>();
    if (entries == nullptr) return names;
    for (const auto& [tensor, item] : *entries) {
      if (const auto* name = item.get_if<std::string>()) names.insert(*name);
    }
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::io) throw;
  }
  return names;
}

/// Throws where a file is one of several that make up a checkpoint, which would be left damaged.
void require_no_shard(const FileSystem& fs, const std::string& path, const std::string& option) {
  const std::string directory = directory_of(path);
  const std::string own_name = last_component(path);
  const auto place = detail::place_in_series(own_name);
  const auto is_beside = [&](const std::string& name) {
    if (name == own_name) return false;
    if (name.ends_with(detail::kIndexSuffix)) {
      return files_of_index(fs, join_path(directory, name)).contains(own_name);
    }
    const auto other = detail::place_in_series(name);
    return place && other && place->series == other->series && place->count == other->count;
  };
  if (own_name.ends_with(detail::kIndexSuffix) ||
      std::ranges::any_of(fs.list_directory(directory), is_beside)) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = path}, option,
                          "a checkpoint to replace", "one file of a sharded one",
                          "name its directory");
  }
}

[[noreturn]] void refuse_company(const std::string& directory, const std::string& name,
                                 const std::string& option) {
  throw Error::expected(ErrorKind::invalid_argument, {.path = directory}, option,
                        "a directory with nothing but a checkpoint's files, all of which it "
                        "replaces",
                        "'" + printable(name) + "' among them", "move it, or write elsewhere");
}

/// Throws where a safetensors file lies beside an index and is not of its checkpoint: neither does
/// the index name it, nor has it the index's own name (what of its series a damaged index lacks).
void require_files_of_index(const FileSystem& fs, const std::string& directory,
                            const std::string& index, const std::vector<std::string>& names,
                            const std::string& option) {
  const std::string model = index.substr(0, index.size() - detail::kIndexSuffix.size());
  const std::set<std::string> named = files_of_index(fs, join_path(directory, index));
  for (const std::string& name : names) {
    const auto place = detail::place_in_series(name);
    const bool is_own = name == index || named.contains(name) ||
                        name.starts_with(model + ".safetensors.") ||
                        (place && place->series == model + "-");
    if (!is_own) refuse_company(directory, name, option);
  }
}

/// Throws where safetensors files are not one checkpoint: by their index, else to a reader.
void require_one_model(const FileSystem& fs, const std::string& directory,
                       const std::vector<std::string>& names, const std::string& option) {
  const std::string usual = "model" + std::string(detail::kIndexSuffix);
  auto index = std::ranges::find(names, usual);
  if (index == names.end()) {
    index = std::ranges::find_if(
        names, [](const std::string& name) { return name.ends_with(detail::kIndexSuffix); });
  }
  if (index != names.end()) return require_files_of_index(fs, directory, *index, names, option);
  if (names.size() < 2) return;
  try {
    open_safetensors(fs, directory);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::io) throw;
    refuse(directory, option, "the files of one checkpoint",
           "files that are none together: " + std::string(error.what()));
  }
}

void require_checkpoint_alone(const FileSystem& fs, const std::string& directory,
                              std::optional<Format> format, const std::string& option) {
  if (const auto name = tessera::detail::first_foreign_entry(
          fs, directory, tessera::detail::FileNames::of_one_checkpoint)) {
    refuse_company(directory, *name, option);
  }
  const std::vector<std::string> names = fs.list_directory(directory);
  for (const std::string& name : names) require_mark(fs, join_path(directory, name), option);
  if (format == Format::safetensors) require_one_model(fs, directory, names, option);
}

}  // namespace

void check_replaceable(const FileSystem& fs, const std::string& path, const std::string& option) {
  const auto kind = fs.kind_of(path);
  if (!kind || (kind == FileKind::directory && fs.list_directory(path).empty())) return;
  std::optional<Format> format;
  try {
    format = detect_format(fs, path);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::io) throw;
    if (error.kind() == ErrorKind::unsupported) {  // and not one that is damaged
      throw Error::expected(ErrorKind::invalid_argument, {.path = path}, option,
                            "a checkpoint to replace", "something else, which stays as it is");
    }
  }
  if (kind == FileKind::directory) {
    require_checkpoint_alone(fs, path, format, option);
  } else if (format) {
    require_no_shard(fs, path, option);
    require_single_file(fs, path, *format, option);
  }
}

}  // namespace tessera::formats
