#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

// The tensors of a checkpoint under another framework's names and shapes (docs/recipes.md).

namespace tessera::recipe {

/// Rules that turn the tensors of one framework into those of another: names, shapes, and slices.
/// Cheap to copy, immutable, thread-safe.
class Recipe {
 public:
  /// Parses a recipe: JSON with comments, `{"schema": 1, "rules": […]}`. `path` is for messages.
  /// Throws: Error(corruption) naming the rule.
  static Recipe parse(std::string_view text, const std::string& path);
  /// Reads and parses a file. Throws: as `parse`; Error(not_found, io).
  static Recipe read(const FileSystem& fs, const std::string& path);

  /// Returns the text that was parsed.
  const std::string& text() const;
  /// Returns the path that `parse` or `read` got.
  const std::string& path() const;
  /// Returns the names of the variables that the recipe declares, sorted.
  std::vector<std::string> variables() const;

 private:
  friend class RecipeAccess;
  struct Parsed;
  explicit Recipe(std::shared_ptr<const Parsed> parsed) : parsed_(std::move(parsed)) {}

  std::shared_ptr<const Parsed> parsed_;  // shared: it never changes, and copies are cheap
};

/// Which way a recipe is applied.
enum class Direction {
  forward,  // each rule's `from` becomes its `to`
  inverse,  // each rule's `to` becomes its `from`
};

/// What the `common.pt` of a torch_dist checkpoint, or the object that replaces it, says about the
/// order of rows of experts (docs/from/megatron.md).
struct MegatronArguments {
  std::map<std::string, std::int64_t> numbers{};  ///< by the name of the argument
  std::string unread{};  ///< why the arguments cannot be read; empty: they were, or there are none
};

/// How to apply a recipe.
struct RecipeOptions {
  Direction direction = Direction::forward;         ///< which way
  std::map<std::string, std::int64_t> variables{};  ///< values that the user gives
  Value config{};             ///< content of config.json; None if there is no such file
  std::string config_path{};  ///< of config.json, for messages
  std::string prefix{};       ///< that the checkpoint's names have and the recipe's names lack
  std::vector<MegatronArguments> megatron_arguments{};  ///< of each source, in their order
  /// Of each source, in their order: that its config.json gives a variable another value.
  std::vector<std::optional<Error>> config_differences{};
};

/// Parses `NAME=NUMBER` (a variable) or `prefix=TEXT`, and sets it in `options`, also if it is
/// already set. Throws: Error(invalid_argument) naming a text of another form.
void add_setting(RecipeOptions& options, std::string_view text);

/// If the recipe takes a variable from `config.json`, reads this file into `options.config`: from
/// the first checkpoint's folder, or else from `model_folder` (may be empty). Without such a file,
/// changes nothing. `Infinity` and `NaN` become None. If a side of the recipe has Megatron's names,
/// also reads `options.megatron_arguments` from a `common.pt` in the folder of each checkpoint, and
/// from the object that replaces it in newer versions. If the new names are Megatron's, a file in
/// `model_folder` goes before these. If a further checkpoint's `config.json` gives a variable
/// another value, which the user has not given, `options.config_differences` says so.
/// `checkpoints`: the sources of a merge or of a combination; otherwise one. Requires: at least one
/// checkpoint, and `options.direction` is set. Throws: Error(corruption) if `config.json` is not
/// JSON.
void read_config(const FileSystem& fs, const Recipe& recipe,
                 const std::vector<std::string>& checkpoints, const std::string& model_folder,
                 RecipeOptions& options);

/// Returns a text with the recipe and what `read_config` has read. Two runs do the same if they
/// have equal texts and also equal directions, variables and prefixes, which are not in the text.
std::string identity_text(const Recipe& recipe, const RecipeOptions& options);

/// How often one rule of a recipe is used.
struct RuleUse {
  std::size_t rule = 0;         ///< its number, from 1, as in messages
  std::size_t num_sources = 0;  ///< tensors that it uses
  std::size_t num_targets = 0;  ///< tensors that it makes
};

/// What a recipe makes of a checkpoint, from names and shapes alone.
struct RecipeReport {
  std::vector<formats::Finding> problems{};  ///< why the recipe cannot be applied; empty if it can
  std::vector<formats::Finding> notes{};     ///< such as what the recipe drops or cannot undo
  std::vector<RuleUse> rules{};              ///< one for each rule, in their order
  std::size_t num_sources = 0;               ///< tensors of the source
  std::size_t num_targets = 0;               ///< tensors that the recipe makes
  std::size_t num_kept = 0;                  ///< tensors that no rule names, kept as they are
  std::vector<std::string> dropped{};        ///< names of the tensors and values that rules drop
  std::uint64_t num_source_elements = 0;     ///< of all tensors of the source
  std::uint64_t num_placed_elements = 0;     ///< of these, elements that new tensors have
  std::uint64_t num_dropped_elements =
      0;  ///< of these, elements in dropped tensors, and those that slices or paddings drop
  std::uint64_t num_equal_elements = 0;  ///< of these, elements left out as equal to others
  bool is_invertible = false;            ///< whether the inverse gives back all that is not dropped
  formats::CheckpointContents targets{};  ///< names, shapes and kinds; without pieces
};

/// Applies a recipe to names and shapes only. Checks that each element of the source is in a new
/// tensor or a rule drops it, that each element of a new tensor comes from one place, and that the
/// inverse gives back the source. Throws: Error(mismatch, invalid_argument, corruption) for
/// variables; Error(mismatch) if Direction::inverse needs the inverse of a rule that has none;
/// Error(unsupported) as open_transformed.
RecipeReport check_recipe(const Recipe& recipe, const formats::CheckpointContents& contents,
                          const RecipeOptions& options);

/// Returns a reader that shows the tensors of `reader` as the recipe makes them, with their
/// optimizer state. It reads elements only on demand, in bounded memory. Some rules need equal
/// elements (a padding, or several tensors that become one). The first read of such a tensor
/// compares these elements, and throws Error(mismatch) if they differ. If the recipe says that the
/// names of `reader` are Megatron's, first renames and unstacks the tensors of a torch_dist
/// checkpoint. If a rule uses experts whose rows take turns, puts the rows of all experts in order;
/// a note says so. Throws: Error(mismatch) if the recipe does not fit, or if values that become one
/// differ; as check_recipe for variables; Error(unsupported) if a Megatron name is too long, or
/// rows are in an order that Tessera cannot undo or does not know.
std::unique_ptr<formats::CheckpointReader> open_transformed(
    std::unique_ptr<formats::CheckpointReader> reader, const Recipe& recipe,
    const RecipeOptions& options);

}  // namespace tessera::recipe
