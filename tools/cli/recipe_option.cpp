#include "cli/recipe_option.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "object_store/files.h"
#include "tessera/base/file_system.h"

namespace tessera::cli {

void add_recipe_options(Command& command, RecipeArguments& arguments) {
  command
      .option("--recipe", "FILE", arguments.path,
              "JSON file: rules that give the tensors other names and shapes (docs/recipes.md)")
      .flag("--inverse", arguments.inverse,
            "Apply the recipe backwards, from its new names to the old ones")
      .option("--set", "NAME=VALUE", arguments.settings,
              "Set a variable of the recipe. prefix=TEXT puts TEXT before all names in its rules. "
              "Repeatable");
}

std::optional<RecipeWithOptions> read_recipe(const RecipeArguments& arguments,
                                             const std::vector<std::string>& checkpoints,
                                             const std::string& model_folder) {
  if (arguments.path.empty()) {
    if (!arguments.inverse && arguments.settings.empty()) return std::nullopt;
    throw Error::expected(ErrorKind::invalid_argument, {},
                          arguments.inverse ? "--inverse" : "--set", "--recipe FILE with it",
                          "none");
  }
  RecipeWithOptions read{recipe::Recipe::read(FileSystem::posix(), arguments.path)};
  if (arguments.inverse) read.options.direction = recipe::Direction::inverse;
  for (const std::string& setting : arguments.settings) recipe::add_setting(read.options, setting);
  const auto unless_standard_input = [](const std::string& path) {
    return path == "-" ? std::string() : path;
  };
  std::vector<std::string> paths;
  std::ranges::transform(checkpoints, std::back_inserter(paths), unless_standard_input);
  recipe::read_config(object_store::files(), read.recipe, paths,
                      unless_standard_input(model_folder), read.options);
  return read;
}

std::string recipe_identity(const std::optional<RecipeWithOptions>& recipe) {
  return recipe ? recipe::identity_text(recipe->recipe, recipe->options) : std::string();
}

std::unique_ptr<formats::CheckpointReader> apply_recipe(
    std::unique_ptr<formats::CheckpointReader> reader,
    const std::optional<RecipeWithOptions>& recipe) {
  if (!recipe) return reader;
  return recipe::open_transformed(std::move(reader), recipe->recipe, recipe->options);
}

}  // namespace tessera::cli
