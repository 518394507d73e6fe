#pragma once

#include <memory>
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

/// Returns the options for `recipe`. The model's config.json, beside the first of `checkpoints`,
/// else in `model_folder` (empty: none), gives values to the recipe's variables. `checkpoints`: as
/// in recipe::read_config. Throws: Error as recipe::add_setting and recipe::read_config.
recipe::RecipeOptions recipe_options(const recipe::Recipe& recipe, const RecipeArguments& arguments,
                                     const std::vector<std::string>& checkpoints,
                                     const std::string& model_folder = {});

/// Returns a text with everything that the result of the recipe depends on, except the checkpoint:
/// the recipe's text, its settings and config.json. Empty if no recipe is given.
std::string recipe_identity(const RecipeArguments& arguments,
                            const std::vector<std::string>& checkpoints,
                            const std::string& model_folder);

/// Returns a reader of the checkpoint as the recipe changes it; `reader` itself without a recipe.
/// Throws Error(invalid_argument) for --inverse or --set alone. `checkpoints`: the paths of the
/// sources of `reader`.
std::unique_ptr<formats::CheckpointReader> apply_recipe(
    std::unique_ptr<formats::CheckpointReader> reader, const RecipeArguments& arguments,
    const std::vector<std::string>& checkpoints, const std::string& model_folder = {});

}  // namespace tessera::cli
