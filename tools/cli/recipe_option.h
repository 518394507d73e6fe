#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/command_line.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/recipe/recipe.h"

namespace tessera::cli {

/// The values of `--recipe FILE`, `--inverse` and `--set NAME=VALUE`.
struct RecipeArguments {
  std::string path{};  // empty: not given
  bool inverse = false;
  std::vector<std::string> settings{};
};

void add_recipe_options(Command& command, RecipeArguments& arguments);

/// The recipe of `--recipe FILE`, and how to apply it.
struct RecipeWithOptions {
  recipe::Recipe recipe;
  recipe::RecipeOptions options{};
};

/// Reads the recipe that the arguments name; nothing if they name none. The model's config.json,
/// beside the first of `checkpoints`, else in `model_folder` (empty: none), gives values to the
/// recipe's variables. `checkpoints`: as in recipe::read_config. Throws: Error(invalid_argument)
/// for --inverse or --set alone; Error as recipe::add_setting and recipe::read_config.
std::optional<RecipeWithOptions> read_recipe(const RecipeArguments& arguments,
                                             const std::vector<std::string>& checkpoints,
                                             const std::string& model_folder = {});

/// Returns a text with everything that the result of the recipe depends on, except the checkpoint:
/// the recipe's text, its settings and config.json. Empty without a recipe.
std::string recipe_identity(const std::optional<RecipeWithOptions>& recipe);

/// Returns a reader of the checkpoint as the recipe changes it; `reader` itself without a recipe.
std::unique_ptr<formats::CheckpointReader> apply_recipe(
    std::unique_ptr<formats::CheckpointReader> reader,
    const std::optional<RecipeWithOptions>& recipe);

}  // namespace tessera::cli
