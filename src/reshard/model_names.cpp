#include "reshard/model_names.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "formats/per_rank.h"
#include "tessera/formats/format_driver.h"

namespace tessera::reshard {
namespace {

using formats::TensorEntry;

bool is_in_dict(std::string_view name, std::string_view dict) {
  return name.starts_with(dict) && name.substr(dict.size()).starts_with('.');
}

bool is_in_any_dict(const std::string& name, std::span<const std::string_view> dicts) {
  const auto own = formats::parse_per_rank_name(name);
  const std::string& shared = own ? own->name : name;
  return std::ranges::any_of(dicts,
                             [&](std::string_view dict) { return is_in_dict(shared, dict); });
}

/// Whether the first key of the tensor's path is `dict` itself, and not a longer text.
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

  const auto is_outside = [&](const TensorEntry& tensor) {
    return !is_in_any_dict(tensor.meta.fqn, dicts);
  };
  const auto outside = std::ranges::find_if(tensors, is_outside);
  if (outside != tensors.end()) {
    const auto count = static_cast<std::size_t>(std::ranges::count_if(tensors, is_outside));
    report.note(std::string(kModelNamesRule), outside->meta.fqn, expected,
                std::to_string(count) + (count == 1 ? " tensor" : " tensors") +
                    " without it, in files that a trainer such as verl does not load");
    return;
  }
  // A flat `model.embed.weight` may be a name of the model, or `embed.weight` of a dict `model`.
  const bool is_flat_model =
      options.renames.empty() && std::ranges::all_of(tensors, [&](const TensorEntry& tensor) {
        return is_in_dict(tensor.meta.fqn, model) && !is_nested_in(tensor, model);
      });
  if (!is_flat_model) return;
  report.note(std::string(kModelNamesRule), tensors.front().meta.fqn,
              expected + " besides their own",
              "names with one '" + std::string(model) +
                  ".', which the files do not keep: as Hugging Face's names they need another one");
}

}  // namespace tessera::reshard
