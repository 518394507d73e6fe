#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/checkpoint_files.h"
#include "formats/safetensors/header.h"
#include "formats/safetensors/values_file.h"
#include "formats/signatures.h"
#include "tessera/base/error.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/safetensors.h"

namespace tessera::formats {
namespace {

constexpr std::string_view kWayOut = "nothing is removed; if nobody needs it, remove it yourself";

bool begins_as_native(std::string_view head) {
  const std::string_view signature = detail::kNativeSignature;
  return head.starts_with(signature) || signature.starts_with(head);  // cut short
}

bool begins_as_safetensors(std::string_view head) {
  constexpr std::uint64_t kLengthNbytes = detail::kHeaderLengthNbytes;
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < std::min<std::size_t>(head.size(), kLengthNbytes); ++i) {
    length |= std::uint64_t{static_cast<unsigned char>(head[i])} << (8 * i);
  }
  return length <= detail::kMaxHeaderNbytes &&
         (head.size() <= kLengthNbytes || head[kLengthNbytes] == '{');
}

bool begins_as_json_object(std::string_view head) {
  return head.substr(std::min(head.find_first_not_of(" \t\r\n"), head.size())).starts_with('{');
}

/// Whatever protocol it was pickled by, the first thing in it is the class.
bool begins_as_dcp_metadata(std::string_view head) {
  return head.find("torch.distributed.checkpoint.metadata") != std::string_view::npos;
}

/// The first entry of the archive is `<name>/data.pkl`, or under TorchScript `<name>/data/0`.
bool begins_as_torch_save(std::string_view head) {
  constexpr std::size_t kNameLengthOffset = 26;
  constexpr std::size_t kNameOffset = 30;
  if (head.size() < kNameOffset) return true;  // cut short
  const auto length = static_cast<unsigned char>(head[kNameLengthOffset]) +
                      std::size_t{static_cast<unsigned char>(head[kNameLengthOffset + 1])} * 256;
  const std::string_view name = head.substr(kNameOffset, length);
  return name.ends_with("/data.pkl") || name.find("/data/") != std::string_view::npos;
}

/// What a file of a checkpoint is, and how it begins.
struct Mark {
  std::string_view name_end;  // empty: of any name
  std::string_view in_words;
  bool (*is_at_begin)(std::string_view head);
};

// Not `.distcp`: those begin with whatever their writer has put around their items.
constexpr std::array kMarks{
    Mark{".h5", "a file of a native checkpoint", begins_as_native},
    Mark{".safetensors", "safetensors", begins_as_safetensors},
    Mark{".safetensors.index.json", "an index of safetensors", begins_as_json_object},
    Mark{".values.json", "values of a checkpoint", detail::begins_as_values_file},
    Mark{".metadata", "metadata of a checkpoint", begins_as_dcp_metadata},
};
constexpr Mark kTorchSave{"", "an archive of torch.save", begins_as_torch_save};

std::string_view found_in_words(std::string_view head) {
  if (detail::is_hdf5(head)) return "an HDF5 file that Tessera did not write";
  if (head.starts_with(detail::kNativeSignature)) return kMarks[0].in_words;
  if (head.starts_with(detail::kZipSignature)) return "another zip archive";
  return "something else";
}

/// Throws where a file does not begin as a checkpoint's file of its name does. An empty one does.
void require_mark(const FileSystem& fs, const std::string& path, const std::string& option) {
  const std::string head = read_begin(fs, path, detail::kLookedAtNbytes).value_or("");
  if (head.empty()) return;
  const auto* mark = std::ranges::find_if(
      kMarks, [&](const Mark& of_name) { return path.ends_with(of_name.name_end); });
  if (mark == kMarks.end() && head.starts_with(detail::kZipSignature)) mark = &kTorchSave;
  if (mark == kMarks.end() || mark->is_at_begin(head)) return;
  throw Error::expected(ErrorKind::invalid_argument, {.path = path}, option, mark->in_words,
                        found_in_words(head), kWayOut);
}

/// Throws where safetensors files that no index holds together are not one checkpoint.
void require_one_model(const FileSystem& fs, const std::string& directory,
                       const std::vector<std::string>& names, const std::string& option) {
  const auto is_index = [](const std::string& name) { return name.ends_with(".index.json"); };
  if (names.size() < 2 || std::ranges::any_of(names, is_index)) return;
  try {
    open_safetensors(fs, directory);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::io) throw;
    throw Error::expected(ErrorKind::invalid_argument, {.path = directory}, option,
                          "the files of one checkpoint",
                          "files that are none together: " + std::string(error.what()), kWayOut);
  }
}

void require_checkpoint_alone(const FileSystem& fs, const std::string& directory,
                              std::optional<Format> format, const std::string& option) {
  if (const auto name = tessera::detail::first_foreign_entry(
          fs, directory, tessera::detail::FileNames::of_any_checkpoint)) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = directory}, option,
                          "a directory with nothing but a checkpoint's files, all of which it "
                          "replaces",
                          "'" + printable(*name) + "' among them", "move it, or write elsewhere");
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
    if (error.kind() == ErrorKind::unsupported) {  // and not one that is damaged
      throw Error::expected(ErrorKind::invalid_argument, {.path = path}, option,
                            "a checkpoint to replace", "something else, which stays as it is");
    }
  }
  if (kind == FileKind::directory) {
    require_checkpoint_alone(fs, path, format, option);
  } else {
    require_mark(fs, path, option);
  }
}

}  // namespace tessera::formats
