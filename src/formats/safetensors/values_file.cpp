#include "formats/safetensors/values_file.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "base/checked_math.h"
#include "base/digest.h"
#include "base/outside_failure.h"
#include "formats/safetensors/header.h"
#include "formats/staging/staged_destination.h"
#include "tessera/base/error.h"

namespace tessera::formats::detail {
namespace {

constexpr std::int64_t kSchema = 1;
constexpr std::string_view kBegin = "{\n  \"schema\": ";  // as `format_values_file` writes it

Value shape_to_value(const Shape& shape) {
  return Value::List(shape.begin(), shape.end());
}

Value units_to_value(const std::vector<FlatUnit>& units) {
  Value::List list;
  for (const FlatUnit& unit : units) {
    Value::List parameters;
    for (const FlatUnitParameter& parameter : unit.parameters) {
      parameters.emplace_back(Value::Dict{{"fqn", parameter.fqn},
                                          {"shape", shape_to_value(parameter.shape)},
                                          {"offset", parameter.offset}});
    }
    list.emplace_back(Value::Dict{{"name", unit.name},
                                  {"dtype", std::string(dtype_name(unit.dtype))},
                                  {"parameters", std::move(parameters)}});
  }
  return list;
}

/// Reads the sections of one values file. Any section may be missing.
class ValuesFileReader {
 public:
  ValuesFileReader(std::string_view text, const std::string& path)
      : path_(path),
        document_(value_from_json(
            parse_json(text, path, {.max_depth = kMaxValuesDepth, .max_nbytes = kMaxValuesNbytes}),
            path)) {
    const Value* schema = document_.find("schema");
    if (schema == nullptr || !schema->is<std::int64_t>()) refuse("", "schema", "a number");
    if (*schema != Value(kSchema)) {
      throw Error::expected(ErrorKind::unsupported, {.path = path_}, "schema",
                            std::to_string(kSchema), value_to_string(*schema),
                            "written by a later version?");
    }
  }

  /// Calls `visit(name, item)` for every entry of the object called `section`.
  void for_each(std::string_view section,
                const std::function<void(const std::string&, const Value&)>& visit) const {
    const Value* found = document_.find(section);
    if (found == nullptr) return;
    const auto* dict = found->get_if<Value::Dict>();
    if (dict == nullptr) refuse("", section, "an object");
    for (const auto& [key, item] : *dict) {
      const auto* name = key.get_if<std::string>();
      if (name == nullptr) refuse("", section, "names");
      visit(*name, item);
    }
  }

  KeyPath key_path(const std::string& name, const Value& item) const {
    std::optional<KeyPath> key_path = key_path_from_value(item);
    if (!key_path) {
      refuse(name, "key_paths",
             "an array of keys: strings, integers, and each other key in an array of its own");
    }
    // Otherwise a format that stores nested dicts would give the entry another name.
    if (spell(*key_path) != name) {
      refuse(name, "key_paths", "keys that give the name when joined by dots");
    }
    return std::move(*key_path);
  }

  StateKind state_kind(const std::string& name, const Value& item) const {
    static constexpr StateKind kKinds[] = {StateKind::plain,
                                           StateKind::pointwise,
                                           StateKind::row_wise,
                                           StateKind::scalar_parameter,
                                           StateKind::scalar_table,
                                           StateKind::opaque,
                                           StateKind::row_wise_per_shard};
    const std::string& word = text(name, "kinds", item);
    for (const StateKind kind : kKinds) {
      if (state_kind_name(kind) == word) return kind;
    }
    refuse(name, "kinds", "a kind of state, such as pointwise");
  }

  const std::string& text(const std::string& name, std::string_view section,
                          const Value& item) const {
    const auto* text = item.get_if<std::string>();
    if (text == nullptr) refuse(name, section, "a string");
    return *text;
  }

  std::vector<FlatUnit> units() const {
    const Value* found = document_.find("units");
    if (found == nullptr) return {};
    std::vector<FlatUnit> units;
    for (const Value& item : items("units", *found)) {
      FlatUnit unit{.name = text("", "units", member(item, "name")), .dtype = {}, .parameters = {}};
      const auto dtype = parse_dtype(text("", "units", member(item, "dtype")));
      if (!dtype) refuse("", "units", "a dtype");
      unit.dtype = *dtype;
      for (const Value& parameter : items("units", member(item, "parameters"))) {
        unit.parameters.push_back(unit_parameter(unit, parameter));
      }
      units.push_back(std::move(unit));
    }
    return units;
  }

  [[noreturn]] void refuse(const std::string& name, std::string_view section,
                           std::string_view expected) const {
    throw Error::expected(ErrorKind::corruption, {.path = path_, .fqn = name}, section, expected,
                          "none, or another value");
  }

 private:
  const Value::List& items(std::string_view section, const Value& value) const {
    const auto* list = value.get_if<Value::List>();
    if (list == nullptr) refuse("", section, "an array");
    return *list;
  }

  const Value& member(const Value& item, std::string_view key) const {
    const Value* found = item.find(key);
    if (found == nullptr) refuse("", "units", "a member '" + std::string(key) + "'");
    return *found;
  }

  FlatUnitParameter unit_parameter(const FlatUnit& unit, const Value& item) const {
    TensorMeta meta{
        .fqn = text("", "units", member(item, "fqn")), .dtype = unit.dtype, .shape = {}};
    for (const Value& size : items("units", member(item, "shape"))) {
      const auto* number = size.get_if<std::int64_t>();
      if (number == nullptr) refuse(meta.fqn, "units", "a shape of integers");
      meta.shape.push_back(*number);
    }
    validate_tensor_meta(meta, path_);
    const auto* offset = member(item, "offset").get_if<std::int64_t>();
    const std::int64_t least = unpadded_numel(unit);
    if (offset == nullptr || *offset < least || !checked_add(*offset, meta.numel())) {
      refuse(meta.fqn, "units", "an offset of at least " + std::to_string(least));
    }
    return {std::move(meta.fqn), std::move(meta.shape), *offset};
  }

  const std::string& path_;
  Value document_;
};

/// Returns the entry with this name, or null if there is none. `sorted` is sorted by name.
template <class Entry, class NameOf>
Entry* find_by_name(std::vector<Entry>& sorted, const std::string& name, NameOf name_of) {
  const auto at = std::ranges::lower_bound(sorted, name, {}, name_of);
  return at != sorted.end() && std::invoke(name_of, *at) == name ? &*at : nullptr;
}

TensorEntry* find_tensor(CheckpointContents& contents, const std::string& name) {
  return find_by_name(contents.tensors, name, [](const TensorEntry& tensor) -> const std::string& {
    return tensor.meta.fqn;
  });
}

Alias* find_alias(CheckpointContents& contents, const std::string& name) {
  return find_by_name(contents.aliases, name, &Alias::fqn);
}

}  // namespace

std::string format_values_file(const CheckpointContents& contents, const std::vector<Value>& values,
                               JsonStyle style) {
  Value::Dict value_dict;
  Value::Dict key_paths;
  Value::Dict kinds;
  Value::Dict parameters;
  const auto add_key_path = [&](const std::string& name, const KeyPath& key_path) {
    if (key_path.empty() || key_path == KeyPath{name}) return;
    key_paths.emplace_back(name, key_path_to_value(key_path));
  };
  for (std::size_t i = 0; i < values.size(); ++i) {
    value_dict.emplace_back(contents.values[i].name, values[i]);
    add_key_path(contents.values[i].name, contents.values[i].key_path);
  }
  for (const TensorEntry& tensor : contents.tensors) {
    add_key_path(tensor.meta.fqn, tensor.key_path);
    if (tensor.kind != StateKind::plain) {
      kinds.emplace_back(tensor.meta.fqn, std::string(state_kind_name(tensor.kind)));
    }
    if (!tensor.parameter.empty()) parameters.emplace_back(tensor.meta.fqn, tensor.parameter);
  }
  for (const Alias& alias : contents.aliases) add_key_path(alias.fqn, alias.key_path);
  if (value_dict.empty() && key_paths.empty() && kinds.empty() && parameters.empty() &&
      contents.units.empty()) {
    return {};
  }
  return value_to_json(Value::Dict{{"schema", kSchema},
                                   {"values", std::move(value_dict)},
                                   {"key_paths", std::move(key_paths)},
                                   {"kinds", std::move(kinds)},
                                   {"parameters", std::move(parameters)},
                                   {"units", units_to_value(contents.units)}},
                       style) +
         (style == JsonStyle::indented ? "\n" : "");
}

void apply_values_file(std::string_view text, const std::string& path, CheckpointContents& contents,
                       std::vector<Value>& values) {
  const ValuesFileReader reader(text, path);
  const auto refuse_unknown = [&](const std::string& name, std::string_view section) {
    throw Error::expected(ErrorKind::corruption, {.path = path, .fqn = name}, section,
                          "the name of an entry in this checkpoint", "no such name");
  };

  std::map<std::string, Value> sorted_values;
  reader.for_each("values", [&](const std::string& name, const Value& item) {
    const bool is_taken =
        find_tensor(contents, name) != nullptr || find_alias(contents, name) != nullptr;
    if (is_taken || !sorted_values.emplace(name, item).second) {
      throw Error::expected(ErrorKind::corruption, {.path = path, .fqn = name}, "values",
                            "a name that no other entry has", "the name of another entry",
                            "was the file edited?");
    }
  });
  for (auto& [name, value] : sorted_values) {
    contents.values.push_back({.name = name, .key_path = {}});
    values.push_back(std::move(value));
  }

  reader.for_each("key_paths", [&](const std::string& name, const Value& item) {
    KeyPath key_path = reader.key_path(name, item);
    if (TensorEntry* tensor = find_tensor(contents, name)) {
      tensor->key_path = std::move(key_path);
    } else if (Alias* alias = find_alias(contents, name)) {
      alias->key_path = std::move(key_path);
    } else if (ValueEntry* value = find_by_name(contents.values, name, &ValueEntry::name)) {
      value->key_path = std::move(key_path);
    } else {
      refuse_unknown(name, "key_paths");
    }
  });
  const auto tensor_called = [&](const std::string& name,
                                 std::string_view section) -> TensorEntry& {
    TensorEntry* tensor = find_tensor(contents, name);
    if (tensor == nullptr) refuse_unknown(name, section);
    return *tensor;
  };
  reader.for_each("kinds", [&](const std::string& name, const Value& item) {
    tensor_called(name, "kinds").kind = reader.state_kind(name, item);
  });
  reader.for_each("parameters", [&](const std::string& name, const Value& item) {
    tensor_called(name, "parameters").parameter = reader.text(name, "parameters", item);
  });
  std::ranges::move(reader.units(), std::back_inserter(contents.units));
}

bool begins_as_values_file(std::string_view head) {
  return head.starts_with(kBegin) || kBegin.starts_with(head);
}

bool is_values_file(const FileSystem& fs, const std::string& path) {
  return read_begin(fs, path, kBegin.size()) == kBegin;
}

bool may_be_values_file(const FileSystem& fs, const std::string& path) {
  const auto begin = read_begin(fs, path, kBegin.size());
  return begin == "" || begin == kBegin;
}

std::string values_digest(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::uint64_t digest = xxh3_64(std::as_bytes(std::span(text)));
  std::string hex(16, '0');
  for (std::size_t i = hex.size(); i-- > 0; digest >>= 4) hex[i] = kHex[digest & 0xF];
  return hex;
}

namespace {

/// Returns the digest of the values file that the metadata of the single file at `tensors` has.
/// Returns nothing if it has none, or if there is no safetensors file.
std::optional<std::string> values_digest_at(const FileSystem& fs, const std::string& tensors) {
  if (fs.kind_of(tensors) != FileKind::regular) return std::nullopt;
  try {
    for (auto& [key, text] : read_header(*fs.open(tensors)).metadata) {
      if (key == kValuesDigestKey) return std::move(text);
    }
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    // A file that is not safetensors names no values.
  }
  return std::nullopt;
}

/// Returns the text at `path` if its digest is `digest`.
std::optional<std::string> text_of_digest(const FileSystem& fs, const std::string& path,
                                          const std::string& digest) {
  if (fs.kind_of(path) != FileKind::regular || fs.open(path)->nbytes() > kMaxValuesNbytes) {
    return std::nullopt;
  }
  std::string text = read_file(fs, path, kMaxValuesNbytes);
  return values_digest(text) == digest ? std::optional(std::move(text)) : std::nullopt;
}

}  // namespace

std::optional<std::string> read_values_file(const FileSystem& fs, const std::string& path,
                                            const std::string& digest) {
  const bool is_there = fs.kind_of(path) == FileKind::regular;
  std::string text = is_there ? read_file(fs, path, kMaxValuesNbytes) : "";
  const std::string found = values_digest(text);
  if (is_there && found == digest) return text;
  for (const std::string& replaced :
       {StagedDestination::staging_path_of(path), StagedDestination::old_path_of(path)}) {
    if (auto replaced_text = text_of_digest(fs, replaced, digest)) return replaced_text;
  }
  if (!is_there) return std::nullopt;
  throw Error::expected(ErrorKind::corruption, {.path = path}, "checksum", digest, found,
                        "are these the values of other tensors, or was the file edited?");
}

void put_back_replaced_values(FileSystem& fs, const std::string& destination) {
  const std::string path = values_path_of(destination);
  const std::string staged = StagedDestination::staging_path_of(path);
  StagedDestination::finish_exchange(fs, path, DestinationKind::member_file);
  if (fs.kind_of(path) != FileKind::regular || fs.kind_of(staged) != FileKind::regular) return;
  const auto digest = values_digest_at(fs, destination);
  if (!digest || text_of_digest(fs, path, *digest)) return;
  if (text_of_digest(fs, staged, *digest)) fs.exchange(staged, path);
}

bool names_values(const FileSystem& fs, const std::string& tensors, const std::string& path) {
  const auto digest = values_digest_at(fs, tensors);
  return digest && text_of_digest(fs, path, *digest);
}

void remove_values_beside(FileSystem& fs, const std::string& destination) noexcept {
  try {
    const std::string path = values_path_of(destination);
    fs.remove_all(path);
    const std::string staged = StagedDestination::staging_path_of(path);
    if (is_values_file(fs, staged)) fs.remove_all(staged);
  } catch (...) {
    // The new checkpoint is complete, so a failure here is ignored.
  }
}

}  // namespace tessera::formats::detail
