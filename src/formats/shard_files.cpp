#include "formats/shard_files.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/json.h"
#include "formats/signatures.h"
#include "tessera/base/error.h"

namespace tessera::formats::detail {
namespace {

std::string shown_directory(const std::string& directory) {
  return directory.empty() ? "." : directory;
}

std::map<std::string, std::string> texts_of(const Value& index) {
  std::map<std::string, std::string> texts;
  const Value* metadata = index.find("metadata");
  const auto* entries = metadata == nullptr ? nullptr : metadata->get_if<Value::Dict>();
  if (entries == nullptr) return texts;
  for (const auto& [key, item] : *entries) {
    const auto& name = *key.get_if<std::string>();
    if (name == "total_size") continue;
    const auto* text = item.get_if<std::string>();
    if (name == "total_parameters" && text == nullptr) continue;
    texts.emplace(name, text == nullptr ? document_to_json(item) : *text);
  }
  return texts;
}

ShardIndex::Rest rest_of(const Value& index) {
  ShardIndex::Rest rest;
  const Value* metadata = index.find("metadata");
  if (metadata != nullptr && !metadata->is<Value::Dict>()) {
    rest.unknown.push_back("'metadata', which is no object");
  }
  if (const Value* size = metadata == nullptr ? nullptr : metadata->find("total_size")) {
    rest.total_size = *size;
  }
  for (const auto& [key, item] : *index.get_if<Value::Dict>()) {
    const auto& name = *key.get_if<std::string>();
    if (name != "metadata" && name != "weight_map") {
      rest.unknown.push_back("'" + printable(name) + "'");
    }
  }
  return rest;
}

/// Whether a JSON value is a number, integer or float, and equals `nbytes`.
bool is_number(const Value& value, std::uint64_t nbytes) {
  if (const auto* integer = value.get_if<std::int64_t>()) {
    return *integer >= 0 && static_cast<std::uint64_t>(*integer) == nbytes;
  }
  const auto* real = value.get_if<double>();
  return real != nullptr && *real == static_cast<double>(nbytes);
}

}  // namespace

std::optional<PlaceInSeries> place_in_series(std::string_view name, std::string_view suffix) {
  static constexpr std::size_t kDigits = 5;
  static constexpr std::string_view kOf = "-of-";
  if (!name.ends_with(suffix)) return std::nullopt;
  name.remove_suffix(suffix.size());
  const auto take_number = [&]() -> std::optional<std::uint64_t> {
    if (name.size() < kDigits) return std::nullopt;
    std::uint64_t number = 0;
    for (const char digit : name.substr(name.size() - kDigits)) {
      if (digit < '0' || digit > '9') return std::nullopt;
      number = number * 10 + static_cast<std::uint64_t>(digit - '0');
    }
    name.remove_suffix(kDigits);
    return number;
  };
  const auto count = take_number();
  if (!count || !name.ends_with(kOf)) return std::nullopt;
  name.remove_suffix(kOf.size());
  const auto number = take_number();
  if (!number) return std::nullopt;
  return PlaceInSeries{std::string(name), *number, *count};
}

std::optional<std::string> index_among(const std::vector<std::string>& names,
                                       const ShardNaming& naming) {
  const std::string usual = std::string(naming.model) + std::string(naming.index_suffix);
  if (std::ranges::find(names, usual) != names.end()) return usual;
  const auto index = std::ranges::find_if(
      names, [&](const std::string& name) { return name.ends_with(naming.index_suffix); });
  return index == names.end() ? std::nullopt : std::optional(*index);
}

bool is_one_of_several(
    const FileSystem& fs, const std::string& path, const ShardNaming& naming,
    const std::function<bool(const std::string& index_path, const std::string& name)>& names_file) {
  const std::string directory = directory_of(path);
  const std::string own_name = last_component(path);
  const auto place = place_in_series(own_name, naming.file_suffix);
  const auto is_beside = [&](const std::string& name) {
    if (name == own_name) return false;
    if (name.ends_with(naming.index_suffix)) {
      return names_file(join_path(directory, name), own_name);
    }
    const auto other = place_in_series(name, naming.file_suffix);
    return place && other && place->series == other->series && place->count == other->count;
  };
  return own_name.ends_with(naming.index_suffix) ||
         std::ranges::any_of(fs.list_directory(directory), is_beside);
}

void require_all_shards(const std::string& directory, const std::vector<std::string>& names,
                        std::vector<PlaceInSeries> (*places_of)(std::string_view name)) {
  std::map<std::pair<std::string, std::uint64_t>, std::set<std::uint64_t>> found;
  for (const std::string& name : names) {
    for (const PlaceInSeries& place : places_of(name)) {
      found[{place.series, place.count}].insert(place.number);
    }
  }
  for (const std::string& name : names) {
    for (const PlaceInSeries& place : places_of(name)) {
      const std::set<std::uint64_t>& numbers = found[{place.series, place.count}];
      const std::uint64_t span = *numbers.rbegin() - *numbers.begin() + 1;
      if (numbers.size() >= place.count && span <= place.count) continue;
      const std::string others = span > place.count
                                     ? ", with numbers from " + std::to_string(*numbers.begin()) +
                                           " to " + std::to_string(*numbers.rbegin())
                                     : "";
      throw Error::expected(ErrorKind::corruption, {.path = join_path(directory, name)}, "shards",
                            std::to_string(place.count) + " files, as the name says",
                            std::to_string(numbers.size()) + others, "incomplete download?");
    }
  }
}

void require_in_checkpoint(const FileSystem& fs, const std::string& directory,
                           const std::string& name) {
  const std::string snapshots = directory_of(fs.resolve_links(shown_directory(directory)));
  const std::string blobs = join_path(directory_of(snapshots), "blobs/");
  if (last_component(snapshots) == "snapshots" &&
      fs.resolve_links(join_path(directory, name)).starts_with(blobs)) {
    return;
  }
  require_contained(fs, shown_directory(directory), name);
}

void refuse_file_beside_index(const std::string& directory, const std::vector<std::string>& names,
                              const std::string& index,
                              const std::vector<std::string>& files_of_index,
                              const ShardNaming& naming) {
  const std::string file =
      index.substr(0, index.size() - naming.index_suffix.size()) + std::string(naming.file_suffix);
  if (std::ranges::find(names, file) == names.end() ||
      std::ranges::binary_search(files_of_index, file)) {
    return;
  }
  throw Error::expected(
      ErrorKind::invalid_argument, {.path = directory}, "models", "the files of one model",
      "'" + printable(file) + "' and '" + printable(index) + "', which does not name that file",
      "one is from another save; give the path of the file or of the index");
}

Error refusal_of_adapter(const std::string& directory, const std::string& model,
                         const std::string& adapter) {
  return Error::expected(
      ErrorKind::invalid_argument, {.path = directory}, "models", "the files of one model",
      "'" + printable(model) + "' and '" + printable(adapter) + "', a model and an adapter",
      "move the adapter to a folder of its own; combine adds it to the model");
}

std::string some_of(const std::vector<std::string>& names) {
  constexpr std::size_t kMaxNamed = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kMaxNamed); ++i) {
    text += (i > 0 ? ", " : "") + printable(names[i]);
  }
  if (names.size() <= kMaxNamed) return text;
  return text + " and " + std::to_string(names.size() - kMaxNamed) + " more";
}

ShardIndex read_shard_index(const FileSystem& fs, const std::string& directory,
                            const std::string& index_path) {
  ShardIndex index;
  const std::string json = read_file(fs, index_path, ShardIndex::kMaxNbytes);
  if (is_hdf5(json) || json.starts_with(kNativeSignature)) {
    throw Error::expected(ErrorKind::corruption, {.path = index_path}, "index", "a JSON object",
                          "an HDF5 file");
  }
  index.whole = parse_json(json, index_path, {.max_nbytes = ShardIndex::kMaxNbytes});
  const Value* weight_map = index.whole.find("weight_map");
  const auto* entries = weight_map == nullptr ? nullptr : weight_map->get_if<Value::Dict>();
  if (entries == nullptr || entries->empty()) {
    throw Error::expected(ErrorKind::corruption, {.path = index_path}, "weight_map",
                          "an object that maps tensors to files", "none, or an empty object");
  }
  for (const auto& [key, item] : *entries) {
    const auto& tensor = *key.get_if<std::string>();
    const auto* file = item.get_if<std::string>();
    const ErrorWhere where{.path = index_path, .fqn = tensor};
    if (file == nullptr) {
      throw Error::expected(ErrorKind::corruption, where, "weight_map", "the name of a file",
                            value_to_string(item, 40));
    }
    if (!is_contained_path(*file)) {
      throw Error::expected(ErrorKind::corruption, where, "weight_map",
                            "a file inside the checkpoint", "'" + printable(*file) + "'");
    }
    index.weight_map.emplace(tensor, *file);
    index.names.push_back(*file);
  }
  index.texts = texts_of(index.whole);
  index.rest = rest_of(index.whole);
  std::ranges::sort(index.names);
  index.names.erase(std::unique(index.names.begin(), index.names.end()), index.names.end());
  for (const std::string& name : index.names) {
    if (!fs.kind_of(join_path(directory, name))) {
      throw Error::expected(ErrorKind::corruption, {.path = index_path}, "weight_map",
                            "a file '" + printable(name) + "'", "none", "incomplete download?");
    }
    require_in_checkpoint(fs, directory, name);
  }
  return index;
}

std::vector<Finding> notes_on_rest(const ShardIndex::Rest& rest, const std::string& index_path,
                                   const std::unordered_map<std::string, std::string>& weight_map,
                                   const CheckpointContents& contents) {
  std::vector<Finding> notes;
  const auto note = [&](std::string expected, std::string found) {
    notes.push_back({.severity = Finding::Severity::note,
                     .rule = "structure",
                     .where = {.path = index_path},
                     .expected = std::move(expected),
                     .found = std::move(found)});
  };
  if (!rest.unknown.empty()) {
    constexpr std::size_t kMaxNamed = 8;
    std::string found;
    for (std::size_t i = 0; i < std::min(rest.unknown.size(), kMaxNamed); ++i) {
      found += (i > 0 ? ", " : "") + rest.unknown[i];
    }
    if (rest.unknown.size() > kMaxNamed) {
      found += " and " + std::to_string(rest.unknown.size() - kMaxNamed) + " more";
    }
    note("only 'metadata' (an object) and 'weight_map'",
         found + " (not read, and left out by a move)");
  }
  if (!rest.total_size) return notes;
  // Accept a tied tensor counted once or per name, and tensors not in weight_map counted or not.
  std::uint64_t all = 0;
  std::uint64_t listed = 0;
  std::uint64_t of_aliases = 0;
  for (const TensorEntry& tensor : contents.tensors) {
    all += tensor.meta.nbytes();
    if (weight_map.contains(tensor.meta.fqn)) listed += tensor.meta.nbytes();
  }
  for (const Alias& alias : contents.aliases) {
    const TensorEntry* const target = contents.find_tensor(alias.target);
    if (target != nullptr) of_aliases += target->meta.nbytes();
  }
  for (const std::uint64_t nbytes : {all, listed, all + of_aliases, listed + of_aliases}) {
    if (is_number(*rest.total_size, nbytes)) return notes;
  }
  note("a total_size of " + std::to_string(listed) + " bytes, as the tensors have",
       value_to_string(*rest.total_size, 40));
  return notes;
}

}  // namespace tessera::formats::detail
