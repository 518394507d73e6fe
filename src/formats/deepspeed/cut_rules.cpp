#include "formats/deepspeed/cut_rules.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <set>
#include <string_view>

#include "base/json.h"
#include "formats/deepspeed/universal_members.h"
#include "tessera/base/error.h"

namespace tessera::formats::deepspeed {
namespace {

using Path = std::vector<std::string>;

constexpr std::uint64_t kMaxRulesNbytes = std::uint64_t{1} << 24;

/// The members that DeepSpeed knows: rules, and members that say nothing about the cuts.
constexpr std::array<std::string_view, 14> kRules = {"universal_checkpoint_version",
                                                     "original_vocab_size",
                                                     "padded_vocab_size",
                                                     "vocabulary_parameter_patterns",
                                                     "pipeline_replicated_parameter_patterns",
                                                     "tp_replicated_parameter_patterns",
                                                     "parameter_to_average_patterns",
                                                     "parameter_with_row_parallelism_patterns",
                                                     "parameter_with_2_sub_params_cat_dim_0",
                                                     "parameter_with_sub_params",
                                                     "sub_param_shard_widths",
                                                     "affine_map",
                                                     "autotp_unsupported_parameter_patterns",
                                                     "ds_autotp_universal_checkpoint_meta"};

bool is_known(const std::string& member) {
  return std::ranges::find(kRules, member) != kRules.end();
}

Path in_model(const Path& path) {
  Path whole{kUniversalCheckpointInfo};
  whole.insert(whole.end(), path.begin(), path.end());
  return whole;
}

const Value* item_at(const Value& value, const std::string& key) {
  if (value.is<Value::Dict>()) return value.find(key);
  const auto* const list = value.get_if<Value::List>();
  std::size_t position = 0;
  const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), position);
  const bool is_position = error == std::errc() && end == key.data() + key.size();
  return list != nullptr && is_position && position < list->size() ? &(*list)[position] : nullptr;
}

/// Returns whether a `File` lists the items of this value as separate entries, not as one value.
bool is_opened(const Value& value) {
  if (const auto* const dict = value.get_if<Value::Dict>()) return !dict->empty();
  const auto* const list = value.get_if<Value::List>();
  return list != nullptr && std::ranges::any_of(*list, [](const Value& item) {
           return item.is<Value::Dict>() || is_opened(item);
         });
}

/// Throws if the user's file is not a JSON object, or has a member that is not a rule.
void require_rules(const Value& json, const std::string& path) {
  const auto* const dict = json.get_if<Value::Dict>();
  if (dict == nullptr) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "tensor parallelism",
                          "a JSON object with rules", std::string(type_name(json)));
  }
  for (const auto& [key, value] : *dict) {
    const auto* const name = key.get_if<std::string>();
    if (name != nullptr && is_known(*name)) continue;
    throw Error::expected(ErrorKind::unsupported, {.path = path}, "tensor parallelism",
                          "a rule of DeepSpeed, such as 'tp_replicated_parameter_patterns'",
                          value_to_string(key), "mistyped?");
  }
}

}  // namespace

CutRules::CutRules(const FileSystem& fs, const std::string& folder, const File& model)
    : model_(model) {
  std::string path = join_path(folder, std::string(kRulesFile));
  if (!fs.kind_of(path)) return;
  require_contained(fs, folder, std::string(kRulesFile));
  json_ = parse_json(read_file(fs, path, kMaxRulesNbytes), path);
  require_rules(*json_, path);
  path_ = std::move(path);
}

bool CutRules::empty() const {
  return !json_ && model_.below({kUniversalCheckpointInfo}).empty();
}

bool CutRules::replaces_member() const {
  return json_ && !model_.below({kUniversalCheckpointInfo}).empty();
}

const std::string& CutRules::path() const {
  return json_ ? path_ : model_.reader().path();
}

std::vector<std::string> CutRules::unknown_members() const {
  std::vector<std::string> unknown = keys_at({});
  std::erase_if(unknown, is_known);
  return unknown;
}

std::map<Path, std::optional<Value>> CutRules::rules_of(const File& model) {
  std::map<Path, std::optional<Value>> rules;
  for (const Entry* const entry : model.below({kUniversalCheckpointInfo})) {
    rules.emplace(entry->path, model.value_of(*entry));
  }
  return rules;
}

const Value* CutRules::find(const Path& path) const {
  const Value* value = &*json_;
  for (const std::string& key : path) {
    if (value != nullptr) value = item_at(*value, key);
  }
  return value;
}

std::optional<Value> CutRules::value_at(const Path& path) const {
  if (!json_) return model_.value_at(in_model(path));
  const Value* const value = find(path);
  return value == nullptr || is_opened(*value) ? std::nullopt : std::optional(*value);
}

std::optional<std::int64_t> CutRules::number_at(const Path& path) const {
  if (!json_) return model_.number_at(in_model(path));
  const Value* const value = find(path);
  const auto* const number = value == nullptr ? nullptr : value->get_if<std::int64_t>();
  return number == nullptr ? std::nullopt : std::optional(*number);
}

std::vector<std::string> CutRules::keys_at(const Path& path) const {
  std::vector<std::string> keys;
  if (!json_) {
    const Path whole = in_model(path);
    std::set<std::string> known;
    for (const Entry* const entry : model_.below(whole)) {
      const std::string& key = entry->path[whole.size()];
      if (known.insert(key).second) keys.push_back(key);
    }
    return keys;
  }
  const Value* const value = find(path);
  const auto* const dict = value == nullptr ? nullptr : value->get_if<Value::Dict>();
  const auto* const list = value == nullptr ? nullptr : value->get_if<Value::List>();
  if (dict != nullptr) {
    for (const auto& [key, item] : *dict) keys.push_back(*key.get_if<std::string>());
  }
  for (std::size_t i = 0; list != nullptr && i < list->size(); ++i) {
    keys.push_back(std::to_string(i));
  }
  return keys;
}

}  // namespace tessera::formats::deepspeed
