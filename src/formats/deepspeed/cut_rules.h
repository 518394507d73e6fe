#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "formats/deepspeed/files.h"
#include "tessera/base/file_system.h"
#include "tessera/base/value.h"

namespace tessera::formats::deepspeed {

/// The member of model states that says how tensor parallelism cut the parameters.
inline constexpr const char* kUniversalCheckpointInfo = "universal_checkpoint_info";

/// The rules by which tensor parallelism cut the parameters, under the names that DeepSpeed uses.
/// They are in the model states, or in a JSON file that the user wrote.
class CutRules {
 public:
  /// Reads the rules from `universal_checkpoint_info.json` in the folder, if the file is there;
  /// else takes them from the model states, `model`, which must outlive this object.
  /// Throws: Error(corruption) if the file is not a JSON object; Error(unsupported) naming a member
  /// of the file that is not a rule; and what reading throws.
  CutRules(const FileSystem& fs, const std::string& folder, const File& model);

  /// Whether there are no rules: neither a user's file (even `{}`) nor rules in the model states.
  bool empty() const;
  /// Whether the rules are in the user's file.
  bool are_of_user() const { return json_.has_value(); }
  /// Whether the model states have rules that are not used, because the user's file replaces them.
  bool replaces_member() const;
  /// Returns the path of the file that has the rules.
  const std::string& path() const;

  /// Returns those members of the model states' rules that Tessera does not know and does not
  /// apply. If such a member is in the user's file, the constructor throws.
  std::vector<std::string> unknown_members() const;
  /// Returns the rules in model states, by path. Each path begins with kUniversalCheckpointInfo.
  static std::map<std::vector<std::string>, std::optional<Value>> rules_of(const File& model);

  /// Returns the value at a path. A path consists of keys of dicts, and of positions in lists as
  /// text. Returns nothing if there is no value. Also returns nothing for a dict with members and
  /// for a list of dicts: `keys_at` lists their members.
  std::optional<Value> value_at(const std::vector<std::string>& path) const;
  std::optional<std::int64_t> number_at(const std::vector<std::string>& path) const;
  /// Returns the keys of the dict, or the positions in the list, at a path.
  std::vector<std::string> keys_at(const std::vector<std::string>& path) const;

 private:
  const Value* find(const std::vector<std::string>& path) const;

  const File& model_;
  std::string path_;           // of the user's file; empty: the rules are in the model states
  std::optional<Value> json_;  // the content of this file
};

}  // namespace tessera::formats::deepspeed
