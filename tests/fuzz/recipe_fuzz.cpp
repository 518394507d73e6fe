#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/recipe/recipe.h"

namespace {

/// Names and shapes for which a recipe may have rules.
tessera::formats::CheckpointContents some_contents() {
  using namespace tessera;
  formats::CheckpointContents contents;
  const auto add = [&](const char* fqn, Shape shape) {
    contents.tensors.push_back({.meta = {fqn, DType::float32, std::move(shape)}});
  };
  add("blocks.0.k", {4, 6});
  add("blocks.0.q", {8, 6});
  add("blocks.1.k", {4, 6});
  add("blocks.1.q", {8, 6});
  add("embed", {100, 6});
  add("optim.state.embed.exp_avg", {100, 6});
  add("optim.state.embed.step", {});
  contents.aliases.push_back({"head", "embed", {}});
  return contents;
}

}  // namespace

/// Parses the input as a recipe and checks it forwards and backwards. If the check says that it is
/// invertible, no source element may be lost: each is placed, dropped, or must equal another one.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  static const formats::CheckpointContents contents = some_contents();
  try {
    const auto recipe = recipe::Recipe::parse(
        std::string_view(reinterpret_cast<const char*>(data), nbytes), "input");
    for (const auto direction : {recipe::Direction::forward, recipe::Direction::inverse}) {
      try {
        recipe::RecipeOptions options{.direction = direction};
        for (const std::string& name : recipe.variables()) options.variables[name] = 4;
        const recipe::RecipeReport report = recipe::check_recipe(recipe, contents, options);
        if (report.is_invertible &&
            report.num_placed_elements + report.num_dropped_elements + report.num_equal_elements <
                report.num_source_elements) {
          std::abort();
        }
      } catch (const Error&) {
      }
    }
  } catch (const Error&) {
  }
  return 0;
}
