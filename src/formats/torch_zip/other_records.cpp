#include "formats/torch_zip/other_records.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

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
  std::size_t num_others = 0;
  std::string names;
  for (const zip::Member& member : archive.zip().members()) {
    if (is_folder(member) || is_read(member.name)) continue;
    if (++num_others > kMaxNamesShown) continue;
    names += (names.empty() ? "'" : ", '") + printable(member.name, kMaxNameNbytes) + "'";
  }
  if (num_others == 0) return std::nullopt;
  if (num_others > kMaxNamesShown) {
    names += " and " + std::to_string(num_others - kMaxNamesShown) + " more";
  }
  return Finding{.severity = Finding::Severity::note,
                 .rule = "records",
                 .where = {.path = archive.zip().path()},
                 .expected = "only records that tensors and values are read from",
                 .found = std::to_string(num_others) +
                          (num_others == 1 ? " other record" : " other records") +
                          ", which a move leaves out: " + names};
}

}  // namespace tessera::formats::torch_zip
