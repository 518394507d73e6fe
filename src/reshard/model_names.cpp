#include "reshard/model_names.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "base/size_text.h"
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

}  // namespace

void note_names_of_model(const Plan& plan, const PlanOptions& options, PlanReport& report) {
  const auto dicts = formats::traits_of(options.format).dicts_with_files;
  const std::vector<TensorEntry>& tensors = plan.destination.tensors;
  if (dicts.empty() || tensors.empty()) return;
  const std::string_view model = dicts.front();
  const std::string expected = "names that begin with '" + std::string(model) + ".'";

  // A dict of the model, or of another item such as the optimizer, shows that the names are those
  // of a trainer's whole state.
  const auto is_of_trainer = [&](const TensorEntry& tensor) {
    return is_nested_in(tensor, model) ||
           std::ranges::any_of(dicts.subspan(1), [&](std::string_view dict) {
             return is_in_dict(tensor.meta.fqn, dict);
           });
  };
  if (std::ranges::any_of(tensors, is_of_trainer)) return;

  std::vector<std::string_view> outside;  // also second names, which the files have too
  for (const TensorEntry& tensor : tensors) outside.push_back(tensor.meta.fqn);
  for (const formats::Alias& alias : plan.destination.aliases) outside.push_back(alias.fqn);
  std::erase_if(outside, [&](std::string_view name) { return is_in_dict(name, model); });
  if (!outside.empty()) {
    report.note(std::string(kModelNamesRule), std::string(outside.front()), expected,
                counted(outside.size(), "tensor") +
                    " without it, in files that a trainer such as verl does not load");
    return;
  }
  // A flat `model.embed.weight` may be a name of the model, or `embed.weight` of a dict `model`.
  if (!options.renames.empty()) return;
  report.note(std::string(kModelNamesRule), tensors.front().meta.fqn,
              expected + ", then the tensor's name in the model",
              "names that begin with '" + std::string(model) +
                  ".' only once; the files drop it, so names of Hugging Face need it twice");
}

}  // namespace tessera::reshard
