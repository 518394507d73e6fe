#include "formats/torch_zip/other_records.h"

#include <algorithm>
#include <cstddef>
#include <ranges>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "base/size_text.h"
#include "tessera/base/error.h"

namespace tessera::formats::torch_zip {
namespace {

constexpr std::string_view kRecordsOfEachSave[] = {
    "data.pkl",        "byteorder",          "version", ".data/serialization_id",
    ".format_version", ".storage_alignment",
};
constexpr std::string_view kStorageFolder = "data/";
constexpr std::size_t kMaxNamesShown = 5;
constexpr std::size_t kMaxNameNbytes = 80;

bool is_folder(const zip::Member& member) {
  return member.name.ends_with('/') && member.nbytes == 0;
}

/// Returns a note about the parts of an archive that the reader does not use. Returns nothing if
/// there are none. `kind`: what the archive calls a part.
std::optional<Finding> note_of(const std::string& path, const std::string& kind,
                               const std::vector<std::string_view>& others) {
  if (others.empty()) return std::nullopt;
  std::string names;
  for (const std::string_view name : others | std::views::take(kMaxNamesShown)) {
    names += (names.empty() ? "'" : ", '") + printable(name, kMaxNameNbytes) + "'";
  }
  if (others.size() > kMaxNamesShown) {
    names += " and " + std::to_string(others.size() - kMaxNamesShown) + " more";
  }
  return Finding{
      .severity = Finding::Severity::note,
      .rule = "records",
      .where = {.path = path},
      .expected = "only " + kind + "s that tensors and values are read from",
      .found = counted(others.size(), "other " + kind) + ", which a move leaves out: " + names};
}

}  // namespace

std::optional<Finding> note_of_other_records(const TorchArchive& archive) {
  const std::unordered_set<std::string_view> storages = archive.storage_keys();
  const std::string folder = archive.prefix() + "/";
  const auto is_read = [&](std::string_view name) {
    if (!name.starts_with(folder)) return false;
    name.remove_prefix(folder.size());
    if (std::ranges::find(kRecordsOfEachSave, name) != std::end(kRecordsOfEachSave)) return true;
    return name.starts_with(kStorageFolder) &&
           storages.contains(name.substr(kStorageFolder.size()));
  };
  std::vector<std::string_view> others;
  for (const zip::Member& member : archive.zip().members()) {
    if (!is_folder(member) && !is_read(member.name)) others.push_back(member.name);
  }
  return note_of(archive.zip().path(), "record", others);
}

std::optional<Finding> note_of_other_members(const TorchTar& archive, const std::string& path) {
  const std::vector<std::string>& others = archive.other_members();
  return note_of(path, "member", {others.begin(), others.end()});
}

}  // namespace tessera::formats::torch_zip
