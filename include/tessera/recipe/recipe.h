#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

// The tensors of a checkpoint under another framework's names and shapes (docs/recipes.md).

namespace tessera::recipe {

/// Rules that turn the tensors of one framework into those of another. A value: cheap to copy,
/// immutable, thread-safe.
class Recipe {
 public:
  /// Parses a recipe: JSON with comments, `{"schema": 1, "rules": […]}`. `path` is for messages.
  /// Throws: Error(corruption) naming the rule.
  static Recipe parse(std::string_view text, const std::string& path);
  /// Reads and parses a file.
  static Recipe read(const FileSystem& fs, const std::string& path);

  /// Returns the text that was parsed.
  const std::string& text() const;
  /// Returns the path for messages.
  const std::string& path() const;
  /// Returns the names of the variables, sorted.
  std::vector<std::string> variables() const;

 private:
  friend class RecipeAccess;
  struct Parsed;
  explicit Recipe(std::shared_ptr<const Parsed> parsed) : parsed_(std::move(parsed)) {}

  std::shared_ptr<const Parsed> parsed_;  // shared: it never changes, and copies are cheap
};

/// Which way a recipe is applied.
enum class Direction {
  forward,
  inverse,  // from the names of `to` to those of `from`
};

/// How to apply a recipe.
struct RecipeOptions {
  Direction direction = Direction::forward;         ///< which way
  std::map<std::string, std::int64_t> variables{};  ///< values given by the user
  Value config{};             ///< content of config.json; None without such a file
  std::string config_path{};  ///< of config.json, for messages
  std::string prefix{};       ///< before each name of the checkpoint, not in the recipe's names
};

/// Parses what the user sets: `NAME=NUMBER` for a variable, `prefix=TEXT` for the prefix. The last
/// text for a name counts. Throws: Error(invalid_argument) naming the text.
void add_setting(RecipeOptions& options, std::string_view text);

/// If a variable of the recipe has a key of `config.json`, reads this file into the options: from
/// the checkpoint's folder, or else `model_folder`, if it is given. Without such a file, changes
/// nothing. `Infinity` and `NaN`, which Python writes, become None. Throws: Error(corruption) if
/// the file is not JSON.
void read_config(const FileSystem& fs, const Recipe& recipe, const std::string& checkpoint,
                 const std::string& model_folder, RecipeOptions& options);

/// Returns a text with the recipe and the content of config.json. Runs with equal texts and equal
/// directions, variables and prefixes do the same.
std::string identity_text(const Recipe& recipe, const RecipeOptions& options);

/// A rule of a recipe, and how many tensors it used and made.
struct RuleUse {
  std::size_t rule = 0;  ///< from 1, as messages count them
  std::size_t num_sources = 0;
  std::size_t num_targets = 0;
};

/// What a recipe makes of a checkpoint, from names and shapes alone.
struct RecipeReport {
  std::vector<formats::Finding> problems{};  ///< why the recipe cannot be applied; empty if it can
  std::vector<formats::Finding> notes{};     ///< what gets lost, as the recipe demands
  std::vector<RuleUse> rules{};
  std::size_t num_sources = 0;         ///< tensors of the source
  std::size_t num_targets = 0;         ///< tensors that the recipe makes
  std::size_t num_kept = 0;            ///< tensors that no rule names, kept as they are
  std::vector<std::string> dropped{};  ///< names of the tensors and values that rules drop
  std::uint64_t num_source_elements = 0;
  std::uint64_t num_placed_elements = 0;  ///< of the source, that occur in targets
  std::uint64_t num_dropped_elements =
      0;                                 ///< of the source, in slices, paddings and dropped tensors
  std::uint64_t num_equal_elements = 0;  ///< of the source, left out because they must equal others
  bool is_invertible = false;  ///< the inverse gives back the source, except what is dropped
  formats::CheckpointContents targets{};  ///< names, shapes and kinds; without pieces
};

/// Applies a recipe to names and shapes, and proves it: each element of the source is placed, or
/// dropped by a rule; each element of a target comes from one place; the inverse gives back the
/// source. Reads no tensor. Throws: Error(mismatch, invalid_argument, corruption) for variables;
/// Error(mismatch) if a rule has no inverse to apply; Error(unsupported) as open_transformed.
RecipeReport check_recipe(const Recipe& recipe, const formats::CheckpointContents& contents,
                          const RecipeOptions& options);

/// Returns a reader that shows the tensors of `reader` as the recipe makes them, with their
/// optimizer state. It reads elements only when it is asked for them, in bounded memory. Some rules
/// need equal elements (a padding, or several tensors that become one): the first read of such a
/// tensor compares them and throws Error(mismatch). If the recipe says that the names of `reader`
/// are Megatron's, first renames and unstacks the tensors of a torch_dist checkpoint. Throws:
/// Error(mismatch) if the recipe does not fit, or if values that become one differ; as check_recipe
/// for variables; Error(unsupported) naming the tensor if its Megatron name is too long for a rule.
std::unique_ptr<formats::CheckpointReader> open_transformed(
    std::unique_ptr<formats::CheckpointReader> reader, const Recipe& recipe,
    const RecipeOptions& options);

}  // namespace tessera::recipe
