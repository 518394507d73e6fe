#include "formats/bin/bin_files.h"

#include <algorithm>
#include <set>
#include <utility>

#include "formats/file_names.h"
#include "tessera/base/error.h"

namespace tessera::formats::bin {
namespace {

void take_index(const FileSystem& fs, const std::string& index_path, FileSet& set) {
  detail::ShardIndex index = detail::read_shard_index(fs, set.directory, index_path);
  set.index_path = index_path;
  set.weight_map = std::move(index.weight_map);
  set.texts = std::move(index.texts);
  set.rest = std::move(index.rest);
  set.names = std::move(index.names);
}

/// Returns those of `names` that belong to a series (`…-00001-of-00003.bin`). Throws if there are
/// files of several series, or if a file of the series is missing.
std::vector<std::string> files_of_series(const std::string& directory,
                                         const std::vector<std::string>& names) {
  std::vector<std::string> files;
  std::set<std::string> series;
  for (const std::string& name : names) {
    const auto place = place_in_series(name);
    if (!place) continue;
    files.push_back(name);
    series.insert(place->series);
  }
  if (series.size() > 1) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = directory}, "shards",
                          "the files of one model",
                          "the files of '" + printable(*series.begin()) + "' and of '" +
                              printable(*series.rbegin()) + "'",
                          "give the path of an index");
  }
  detail::require_all_shards(directory, files, [](std::string_view name) {
    return std::vector{*place_in_series(name)};  // `files` has only such names
  });
  return files;
}

/// Throws if a folder has the file of a second model, `pytorch_model_1.bin`. accelerate writes one
/// for each further model that was prepared together with the first.
void refuse_second_model(const std::string& directory, const std::vector<std::string>& names) {
  const auto second = std::ranges::find_if(
      names, [](const std::string& name) { return is_name_like(name, "pytorch_model_#.bin"); });
  if (second == names.end()) return;
  throw Error::expected(ErrorKind::invalid_argument, {.path = directory}, "models",
                        "the file of one model",
                        "'" + std::string(kModelFile) + "' and '" + printable(*second) +
                            "', as accelerate writes several models",
                        "give the path of one file; merge joins several under prefixes");
}

}  // namespace

std::optional<detail::PlaceInSeries> place_in_series(std::string_view name) {
  return detail::place_in_series(name, kFileSuffix);
}

std::optional<std::string> lone_file(const std::vector<std::string>& names) {
  const auto has = [&](std::string_view name) {
    return std::ranges::find(names, name) != names.end();
  };
  if (has(kModelFile)) return std::string(kModelFile);
  if (has("adapter_model.bin") && has("adapter_config.json")) return "adapter_model.bin";
  return std::nullopt;
}

FileSet find_files(const FileSystem& fs, const std::string& path) {
  if (fs.kind_of(path) != FileKind::directory) {
    FileSet set{.directory = directory_of(path)};
    take_index(fs, path, set);
    return set;
  }
  FileSet set{.directory = path};
  const std::vector<std::string> names = fs.list_directory(path);
  if (const auto index = detail::index_among(names, kShardNaming)) {
    const bool is_usual = index->starts_with("pytorch_model.");
    const auto num_indexes = std::ranges::count_if(
        names, [](const std::string& name) { return name.ends_with(kIndexSuffix); });
    if (num_indexes > 1 && !is_usual) {
      throw Error::expected(ErrorKind::invalid_argument, {.path = path}, "index", "one index",
                            std::to_string(num_indexes) + " indexes", "give the path of one index");
    }
    detail::require_in_checkpoint(fs, path, *index);
    take_index(fs, join_path(path, *index), set);
    detail::refuse_file_beside_index(path, names, *index, set.names, kShardNaming);
    return set;
  }
  set.names = files_of_series(path, names);
  set.lacks_index = !set.names.empty();
  if (set.names.empty()) {
    if (const auto lone = lone_file(names)) set.names.push_back(*lone);
    if (set.names == std::vector{std::string(kModelFile)}) refuse_second_model(path, names);
  }
  constexpr std::string_view kAdapter = "adapter_model.bin";
  const bool has_adapter = std::ranges::find(names, kAdapter) != names.end();
  if (has_adapter && !set.names.empty() && set.names[0] != kAdapter) {
    throw detail::refusal_of_adapter(path, set.names[0], std::string(kAdapter));
  }
  if (set.names.empty()) {
    throw Error::expected(ErrorKind::not_found, {.path = path}, "model",
                          "an index or .bin files of a model", "neither of them");
  }
  for (const std::string& name : set.names) detail::require_in_checkpoint(fs, path, name);
  return set;
}

}  // namespace tessera::formats::bin
