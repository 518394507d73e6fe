#include "arithmetic/source_match.h"

#include <algorithm>
#include <array>
#include <utility>

#include "arithmetic/element_sum.h"
#include "base/cast.h"
#include "formats/per_rank.h"
#include "formats/quantized_tensors.h"
#include "reshard/optimizer_rules.h"
#include "tessera/base/error.h"

namespace tessera::arithmetic {
namespace {

using formats::CheckpointContents;
using formats::CheckpointReader;
using formats::Finding;
using formats::TensorEntry;

std::optional<std::size_t> find_in(const SelectedEntries::Indices& indices, std::string_view name) {
  const auto found = indices.find(name);
  return found == indices.end() ? std::nullopt : std::optional(found->second);
}

/// Compares one source with the first one.
class Match {
 public:
  Match(const CheckpointReader& first, const SelectedEntries& first_entries,
        const CheckpointReader& other, const SelectedEntries& other_entries,
        std::vector<Finding>& problems)
      : first_(first),
        first_entries_(first_entries),
        other_(other),
        other_entries_(other_entries),
        problems_(problems) {}

  void run() {
    for (const auto& [name, index] : first_entries_.tensors()) {
      const auto found = other_entries_.find_tensor_of_rank(name);
      if (found) {
        compare(name, first_.contents().tensors[index], other_.contents().tensors[*found]);
      } else {
        problems_.push_back(combine_problem(name, "a tensor of this name in all sources",
                                            "none in " + printable(other_.path())));
      }
    }
    for (const auto& [name, index] : other_entries_.tensors()) {
      if (first_entries_.tensors().contains(name) || is_tied_in_both(name, index)) continue;
      problems_.push_back(without_first(name));
    }
    find_missing();
  }

 private:
  /// Whether both sources tie the other source's tensor `index`, called `name` there, to the tensor
  /// that the first source stores. They may store a tied tensor under different names.
  bool is_tied_in_both(const std::string& name, std::size_t index) const {
    const auto tied = first_entries_.find_tensor(name);
    return tied && other_entries_.find_tensor(first_.contents().tensors[*tied].meta.fqn) == index;
  }

  /// Returns the problem of a tensor that the first source does not have under its own name.
  Finding without_first(const std::string& name) const {
    if (const auto tied = first_entries_.find_tensor(name)) {
      return combine_problem(name,
                             "tied to " + printable(first_.contents().tensors[*tied].meta.fqn) +
                                 ", as in " + printable(first_.path()),
                             "a separate tensor in " + printable(other_.path()));
    }
    if (first_entries_.find_tensor_of_rank(name)) {
      return combine_problem(name,
                             "a first source that has this rank's own copy too (give " +
                                 printable(other_.path()) + " first)",
                             "one copy for all ranks in " + printable(first_.path()),
                             {Remedy::Action::leave_out, "per_rank.*"});
    }
    return combine_problem(name, "a tensor of this name in all sources",
                           "none in " + printable(first_.path()));
  }

  void compare(const std::string& name, const TensorEntry& first, const TensorEntry& other) {
    const auto described = [](const TensorEntry& tensor) {
      return std::string(dtype_name(tensor.meta.dtype)) + " " + shape_to_string(tensor.meta.shape);
    };
    const bool is_summed = can_be_summed(first.meta.dtype);
    const bool has_same_numbers =
        is_summed ? can_be_summed(other.meta.dtype) &&
                        is_complex(first.meta.dtype) == is_complex(other.meta.dtype)
                  : first.meta.dtype == other.meta.dtype;
    if (first.meta.shape == other.meta.shape && has_same_numbers) return;
    problems_.push_back(combine_problem(name,
                                        described(first) + ", as in " + printable(first_.path()),
                                        described(other) + " in " + printable(other_.path())));
  }

  void find_missing() {
    const formats::MissingData missing = other_.find_missing_data();
    for (const auto& [name, tensor] : other_entries_.tensors()) {
      const auto pieces = missing.pieces.find(tensor);
      if (pieces == missing.pieces.end()) continue;
      problems_.push_back(combine_problem(name, "all files of " + printable(other_.path()),
                                          "no file " + printable(pieces->second.begin()->second)));
    }
  }

  const CheckpointReader& first_;
  const SelectedEntries& first_entries_;
  const CheckpointReader& other_;
  const SelectedEntries& other_entries_;
  std::vector<Finding>& problems_;
};

/// Reports optimizer state that the options do not leave out. Optimizer state belongs to the
/// parameters of one run, so sums of it have no meaning. State that only its name tells counts too:
/// OptimizerSelection::leave_out keeps it with a note, so that a model with such names can still be
/// added up.
void find_optimizer_state(const CheckpointReader& source, const NameSelection& only,
                          std::vector<Finding>& problems) {
  const reshard::OptimizerEntries optimizer(source.contents());
  std::size_t number = 0;
  std::string first;
  const auto add = [&](const std::string& name) {
    if (!only.selects(name)) return;
    if (!optimizer.contain(name) && !optimizer.states().behind_state(name)) return;
    if (number++ == 0) first = name;
  };
  for (const TensorEntry& tensor : source.contents().tensors) add(tensor.meta.fqn);
  for (const formats::ValueEntry& value : source.contents().values) add(value.name);
  if (number == 0) return;
  Finding problem =
      combine_problem({}, "only parameters and buffers",
                      std::to_string(number) + " entries of optimizer state: " + printable(first) +
                          (number > 1 ? ", …" : ""),
                      {Remedy::Action::drop_optimizer});
  problem.where.path = source.path();
  problems.push_back(std::move(problem));
}

/// Reports tensors of quantized weights, because their elements are codes, not numbers. Also
/// reports what may be codes or scales, as a cast does.
void find_quantized_weights(const CheckpointReader& source, const std::string& method,
                            const SelectedEntries& entries, std::vector<Finding>& problems) {
  const formats::QuantizedTensors quantized(source.contents(), method);
  std::optional<std::string> unknown_codes = quantized.unknown_codes_in_words();
  const auto add = [&](const std::string& name, std::string found) {
    problems.push_back(combine_problem(name, "numbers to add up", std::move(found)));
    problems.back().where.path = source.path();
  };
  for (const auto& [name, index] : entries.tensors()) {
    const formats::QuantizedPart* const part = quantized.find(index);
    const auto doubt = part == nullptr ? quantized.doubt_in_words(index) : std::nullopt;
    if (part != nullptr) {
      add(name, quantized.in_words(*part));
    } else if (doubt) {
      add(name, *doubt);
    } else if (unknown_codes && can_be_summed(source.contents().tensors[index].meta.dtype)) {
      add(name, *unknown_codes);
      unknown_codes.reset();  // once is enough
    }
  }
}

/// Returns the layer of a matrix of an adapter whose change is a product of matrices, as its name
/// tells; nothing for other tensors. `.lora_` is in names of PEFT, kohya (`lora_down`), torchtune
/// and MLX (`lora_a`); `.hada_` is LoHa, `.lokr_` LoKr, `.vera_` VeRA; diffusers has names such as
/// `to_q_lora.down`, and NeMo `adapter.linear_in`.
std::optional<std::string> layer_of_adapter(const std::string& name) {
  constexpr std::array<std::string_view, 8> kKeys = {".lora_",
                                                     ".hada_",
                                                     ".lokr_",
                                                     ".vera_",
                                                     "lora.down.",
                                                     "lora.up.",
                                                     ".adapter.linear_in.",
                                                     ".adapter.linear_out."};
  for (const std::string_view key : kKeys) {
    const std::size_t at = name.rfind(key);
    if (at != std::string::npos) return name.substr(0, name.rfind('.', at));
  }
  return std::nullopt;
}

/// Returns whether the name is as in the files of PEFT's adapters, where that of an embedding has a
/// copy of the layer's weight. A model in training has the adapter's name in it: `lora_A.default`.
bool is_stored_by_peft(const std::string& name) {
  constexpr std::array<std::string_view, 4> kEnds = {".lora_A.weight", ".lora_B.weight",
                                                     ".lora_embedding_A", ".lora_embedding_B"};
  return name.starts_with("base_model.model.") &&
         std::ranges::any_of(kEnds, [&](std::string_view end) { return name.ends_with(end); });
}

/// Returns whether the weight to which an adapter of the layer adds its change is there, too.
bool has_weight(const std::string& layer, const SelectedEntries& entries) {
  constexpr std::array<const char*, 4> kEnds = {".weight", ".base_layer.weight" /* PEFT */,
                                                ".to_wrap.weight" /* NeMo */,
                                                ".linear.weight" /* MLX */};
  return std::ranges::any_of(
      kEnds, [&](const char* end) { return entries.find_tensor(layer + end).has_value(); });
}

}  // namespace

Finding combine_problem(std::string fqn, std::string expected, std::string found, Remedy remedy) {
  return {.severity = Finding::Severity::error,
          .rule = kCombineRule,
          .where = {.fqn = std::move(fqn)},
          .expected = std::move(expected),
          .found = std::move(found),
          .remedy = std::move(remedy)};
}

SelectedEntries::SelectedEntries(const CheckpointContents& contents,
                                 const reshard::PlanOptions& selection) {
  reshard::PlanOptions without_optimizer;
  without_optimizer.only = selection.only;
  without_optimizer.optimizer = reshard::OptimizerSelection::leave_out;
  const reshard::MovedSelection selected(contents, without_optimizer);
  std::map<std::string_view, std::size_t> all;
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    const std::string& name = contents.tensors[i].meta.fqn;
    all.emplace(name, i);
    if (selected.contains(name)) tensors_.emplace(name, i);
  }
  std::map<std::size_t, std::string> first_names;  // of tensors whose own name is not selected
  for (const formats::Alias& alias : contents.aliases) {
    if (!selected.contains(alias.fqn)) continue;
    const std::size_t index = all.at(alias.target);
    aliases_.emplace(alias.fqn, index);
    if (selected.contains(alias.target)) continue;
    const auto first = first_names.try_emplace(index, alias.fqn).first;
    first->second = std::min(first->second, alias.fqn);
  }
  for (const auto& [index, name] : first_names) tensors_.emplace(name, index);
  for (std::size_t i = 0; i < contents.values.size(); ++i) {
    const std::string& name = contents.values[i].name;
    if (selected.contains(name)) values_.emplace(name, i);
  }
}

std::optional<std::size_t> SelectedEntries::find_tensor(std::string_view name) const {
  const auto found = find_in(tensors_, name);
  return found ? found : find_in(aliases_, name);
}

std::optional<std::size_t> SelectedEntries::find_tensor_of_rank(std::string_view name) const {
  const auto own = find_tensor(name);
  return own ? own : find_tensor(formats::name_without_rank(name));
}

std::optional<std::size_t> SelectedEntries::find_value(std::string_view name) const {
  return find_in(values_, name);
}

std::vector<Finding> match_sources(const std::vector<const CheckpointReader*>& sources,
                                   const std::vector<SelectedEntries>& entries,
                                   const std::vector<std::string>& quantization_methods,
                                   const reshard::PlanOptions& selection) {
  std::vector<Finding> problems;
  for (std::size_t s = 0; s < sources.size(); ++s) {
    if (selection.optimizer == reshard::OptimizerSelection::keep) {
      find_optimizer_state(*sources[s], selection.only, problems);
    }
    find_quantized_weights(*sources[s], quantization_methods[s], entries[s], problems);
    if (s > 0) Match(*sources[0], entries[0], *sources[s], entries[s], problems).run();
  }
  return problems;
}

std::vector<Finding> find_floats_without_sum(const CheckpointReader& source,
                                             const SelectedEntries& entries) {
  const formats::QuantizedTensors quantized(source.contents());
  std::vector<Finding> problems;
  for (const auto& [name, index] : entries.tensors()) {
    const DType dtype = source.contents().tensors[index].meta.dtype;
    if (!is_floating_point(dtype) || can_be_summed(dtype) || quantized.find(index) != nullptr) {
      continue;
    }
    const bool has_numbers = can_cast(dtype, DType::float32);
    problems.push_back(combine_problem(
        name, "a dtype that sums can be rounded to",
        std::string(dtype_name(dtype)) +
            (has_numbers ? " (cast the source first)" : ", which can only be copied")));
    problems.back().where.path = source.path();
  }
  return problems;
}

std::optional<Finding> find_adapter(const CheckpointReader& source,
                                    const SelectedEntries& entries) {
  std::optional<Finding> note;
  for (const auto& [name, index] : entries.tensors()) {
    const auto layer = layer_of_adapter(name);
    if (!layer) continue;
    if (is_stored_by_peft(name) || !has_weight(*layer, entries)) {
      Finding problem = combine_problem(
          name,
          "no LoRA adapter, because its change is a product of matrices, so a sum of adapters is "
          "not that of their changes",
          "an adapter (merge it into its model, scaled by its weight)");
      problem.where.path = source.path();
      return problem;
    }
    if (note) continue;
    note = combine_problem(name,
                           "no matrices of an adapter beside the weights, because their product is "
                           "what changes the model, and the sum is not that of the products",
                           "such matrices, which are added up one by one");
    note->severity = Finding::Severity::note;
    note->where.path = source.path();
  }
  return note;
}

}  // namespace tessera::arithmetic
