#include "formats/extra_entries.h"

#include <algorithm>
#include <array>
#include <utility>

#include "formats/bin/bin_files.h"
#include "formats/staging/staged_destination.h"
#include "object_store/files.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {
namespace {

/// Returns `name` without the suffix of a staging path, or of a replaced checkpoint.
std::string without_partial(const std::string& name) {
  for (const std::string& suffix :
       {StagedDestination::staging_path_of(""), StagedDestination::old_path_of("")}) {
    if (name.ends_with(suffix)) return name.substr(0, name.size() - suffix.size());
  }
  return name;
}

/// Whether a file of this name, with or without `.partial` or `.partial.old`, can belong to a
/// checkpoint.
bool is_checkpoint_name(const std::string& directory, const std::string& name) {
  // PEFT's adapter_model.bin is recognized only beside its configuration.
  const std::vector<std::string> names{name, "adapter_config.json"};
  return std::ranges::any_of(format_drivers(), [&](const FormatDriver* driver) {
    return driver->may_own_file(without_partial(name)) ||
           driver->recognize_directory({directory, names}).match >= Match::by_name;
  });
}

bool is_journal(const FileSystem& fs, const std::string& path) {
  constexpr std::string_view kMagic = StagedDestination::kJournalMagic;
  return path.ends_with(
             StagedDestination::journal_path_of(StagedDestination::staging_path_of(""))) &&
         read_begin(fs, path, kMagic.size()) == kMagic;
}

/// Whether an entry is a journal, or a file or directory with a journal beside it. A writer of
/// Tessera writes there, or died while it wrote there or replaced a checkpoint.
bool is_work(const FileSystem& fs, const std::string& directory, const std::string& name) {
  const std::string path = join_path(directory, name);
  const bool is_old = name.ends_with(StagedDestination::old_path_of(""));
  const std::string staging_path =
      is_old ? StagedDestination::staging_path_of(join_path(directory, without_partial(name)))
             : path;
  return is_journal(fs, path) || is_journal(fs, StagedDestination::journal_path_of(staging_path));
}

ExtraEntry entry_at(const std::string& directory, const std::string& name) {
  using Kind = ExtraEntry::Kind;
  const auto object = object_store::find_name(join_path(directory, name));
  if (!object || object->kind == object_store::NamedObject::Kind::other) return {name, Kind::other};
  if (object->kind == object_store::NamedObject::Kind::link) return {name, Kind::link};
  if (object->kind == object_store::NamedObject::Kind::folder) return {name, Kind::folder};
  return {name, is_checkpoint_name(directory, name) ? Kind::checkpoint_file : Kind::file,
          object->nbytes};
}

}  // namespace

bool holds_tensors(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 17> kBeginsAndEnds = {{
      {"model", ".bin"},
      {"model", ".pt"},
      {"model", ".pth"},
      {"model", ".ckpt"},
      {"model", ".npz"},
      {"weights", ".npz"},
      {"optimizer", ".bin"},
      {"optimizer", ".pt"},
      {"optimizer", ".pth"},
      {"consolidated", ".pth"},
      {"value_head", ".bin"},
      {"tf_model", ".h5"},
      {"flax_model", ".msgpack"},
      {"rust_model", ".ot"},
      {"", ".gguf"},
      {"", ".onnx"},
      {"", ".onnx_data"},
  }};
  // Others put their name before it, as open_clip and diffusers do.
  const bool is_of_torch = name.find(bin::kModelBegin) != std::string_view::npos &&
                           (name.ends_with(".bin") || name.ends_with(".pt"));
  return is_of_torch || std::ranges::any_of(kBeginsAndEnds, [&](const auto& each) {
           return name.starts_with(each.first) && name.ends_with(each.second);
         });
}

std::vector<ExtraEntry> list_extra_entries(const FileSystem& fs, const std::string& directory,
                                           Format format, const std::set<std::string>& opened) {
  const std::vector<std::string> names = fs.list_directory(directory);
  const std::vector<std::string> own = driver_of(format).own_files(fs, directory, names, opened);
  const auto is_opened = [&](const std::string& path) {
    const std::string within = join_path(path, "");
    const auto next = opened.lower_bound(within);
    return opened.contains(path) || (next != opened.end() && next->starts_with(within));
  };
  std::vector<ExtraEntry> entries;
  for (const std::string& name : names) {
    const bool is_own = std::ranges::binary_search(own, name) ||
                        is_opened(join_path(directory, name)) || is_work(fs, directory, name);
    if (is_own) continue;
    ExtraEntry entry = entry_at(directory, name);
    const bool is_unnamed = entry.kind == ExtraEntry::Kind::checkpoint_file &&
                            driver_of(format).may_own_file(without_partial(name));
    if (is_unnamed) entry.kind = ExtraEntry::Kind::unnamed_file;
    entries.push_back(std::move(entry));
  }
  return entries;
}

std::set<std::string> list_own_folders(const std::string& directory,
                                       const std::set<std::string>& opened) {
  const std::string prefix = join_path(directory, "");
  std::set<std::string> folders;
  for (const std::string& path : opened) {
    if (!path.starts_with(prefix)) continue;
    std::size_t slash = path.find('/', prefix.size());
    for (; slash != std::string::npos; slash = path.find('/', slash + 1)) {
      folders.insert(path.substr(prefix.size(), slash - prefix.size()));
    }
  }
  return folders;
}

std::vector<ExtraEntry> list_entries_beside_checkpoints(const FileSystem& fs,
                                                        const std::string& directory) {
  std::vector<ExtraEntry> entries;
  for (const std::string& name : fs.list_directory(directory)) {
    if (is_work(fs, directory, name) || is_checkpoint_name(directory, name)) continue;
    entries.push_back(entry_at(directory, name));
  }
  return entries;
}

}  // namespace tessera::formats
