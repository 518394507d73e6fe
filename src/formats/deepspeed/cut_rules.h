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

/// The rules by which tensor parallelism cut the parameters: members with the names that DeepSpeed
/// gives them. They are a member of the model states, or a file of the user.
class CutRules {
 public:
  /// Reads the rules from `universal_checkpoint_info.json` in the folder, if the file is there;
  /// else takes them from the model states, which must outlive this.
  /// Throws: Error(corruption) for a file that is no JSON object; Error(unsupported) naming a
  /// member of the file that is no rule; what reading throws.
  CutRules(const FileSystem& fs, const std::string& folder, const File& model);

  /// Whether there are no rules.
  bool empty() const;
  /// Whether the rules are in the user's file.
  bool are_of_user() const { return json_.has_value(); }
  /// Whether the model states have rules that the file replaces.
  bool replaces_member() const;
  /// Returns the path of the file that has the rules.
  const std::string& path() const;

  /// Returns the members of the model states' rules that are not known, so are not applied. In the
  /// user's file, such members are refused.
  std::vector<std::string> unknown_members() const;
  /// Returns the rules in model states, by path.
  static std::map<std::vector<std::string>, std::optional<Value>> rules_of(const File& model);

  /// Returns the value at a path: keys of dicts, and positions in lists as text. Returns nothing if
  /// there is no value, and for a dict with members or a list of dicts: `keys_at` shows what they
  /// have.
  std::optional<Value> value_at(const std::vector<std::string>& path) const;
  std::optional<std::int64_t> number_at(const std::vector<std::string>& path) const;
  /// Returns the keys of the dict, or the positions in the list, at a path.
  std::vector<std::string> keys_at(const std::vector<std::string>& path) const;

 private:
  const Value* find(const std::vector<std::string>& path) const;

  const File& model_;
  std::string path_;           // of the user's file; empty: the rules are in the model states
  std::optional<Value> json_;  // what this file has
};

}  // namespace tessera::formats::deepspeed
