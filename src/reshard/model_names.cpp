#include "reshard/model_names.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "base/size_text.h"
#include "reshard/optimizer_rules.h"
#include "tessera/formats/format_driver.h"

namespace tessera::reshard {
namespace {

using formats::TensorEntry;

bool is_in_dict(std::string_view name, std::string_view dict) {
  return name.starts_with(dict) && name.substr(dict.size()).starts_with('.');
}

/// Whether the outermost key of the tensor is `dict` itself, and not a text such as `model.w`.
bool is_nested_in(const TensorEntry& tensor, std::string_view dict) {
  return !tensor.key_path.empty() && tensor.key_path.front() == formats::Key(std::string(dict));
}

/// Returns the names of optimizer state that is in another dict than `optimizer`.
std::vector<std::string_view> state_outside(const formats::CheckpointContents& contents,
                                            std::string_view optimizer) {
  const StateRoots states(contents);
  std::vector<std::string_view> names;
  for (const TensorEntry& tensor : contents.tensors) {
    const std::string_view name = tensor.meta.fqn;
    if (states.behind_state(name) && !is_in_dict(name, optimizer)) names.push_back(name);
  }
  return names;
}

}  // namespace

void note_names_of_model(const Plan& plan, const PlanOptions& options, PlanReport& report) {
  const auto dicts = formats::traits_of(options.format).dicts_with_files;
  const std::vector<TensorEntry>& tensors = plan.destination.tensors;
  if (dicts.size() < 2 || tensors.empty()) return;
  const std::string_view model = dicts[0];
  const std::string_view optimizer = dicts[1];
  const std::string expected = "names that begin with '" + std::string(model) + ".'";
  const std::string_view without =
      " without it, in files that a trainer such as verl does not load";

  const auto is_of_optimizer = [&](const TensorEntry& tensor) {
    return is_in_dict(tensor.meta.fqn, optimizer);
  };
  const bool has_optimizer = std::ranges::any_of(tensors, is_of_optimizer);
  const std::vector<std::string_view> other_state = state_outside(plan.destination, optimizer);
  const bool has_state = has_optimizer || !other_state.empty();
  const auto is_of_model = [&](const TensorEntry& tensor) {
    // Optimizer state shows that `model.w` is a name of a trainer's whole state, nested or not.
    return is_nested_in(tensor, model) || (has_state && is_in_dict(tensor.meta.fqn, model));
  };
  if (std::ranges::any_of(tensors, is_of_model)) {
    if (has_optimizer || other_state.empty()) return;
    report.note("names of the optimizer", std::string(other_state.front()),
                "names that begin with '" + std::string(optimizer) + ".'",
                counted(other_state.size(), "tensor") + std::string(without));
    return;
  }

  std::vector<std::string_view> outside;  // also second names, which the files have too
  for (const TensorEntry& tensor : tensors) outside.push_back(tensor.meta.fqn);
  for (const formats::Alias& alias : plan.destination.aliases) outside.push_back(alias.fqn);
  std::erase_if(outside, [&](std::string_view name) {
    return std::ranges::any_of(dicts,
                               [&](std::string_view dict) { return is_in_dict(name, dict); });
  });
  if (!outside.empty()) {
    report.note(std::string(kModelNamesRule), std::string(outside.front()), expected,
                counted(outside.size(), "tensor") + std::string(without));
    return;
  }
  if (has_state) return;
  // A flat `model.embed.weight` may be a name of the model, or `embed.weight` of a dict `model`.
  if (!options.renames.empty()) return;
  report.note(std::string(kModelNamesRule), tensors.front().meta.fqn,
              expected + ", then the tensor's name in the model",
              "names that begin with '" + std::string(model) +
                  ".' only once; the files drop it, so names of Hugging Face need it twice");
}

}  // namespace tessera::reshard
