#include "arithmetic/adapter_targets.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "arithmetic/element_sum.h"
#include "arithmetic/tied_embeddings.h"
#include "base/float_text.h"
#include "formats/per_rank.h"
#include "tessera/base/error.h"

namespace tessera::arithmetic {

using inspect::TensorReader;

namespace {

constexpr std::string_view kWeightKey = ".weight";

/// Returns the last name of a layer, `c_proj` for `h.0.attn.c_proj.weight`. Empty if it is a
/// number, because the layers of a torch.nn.Sequential have no more than that in common.
std::string_view last_name_of(std::string_view weight) {
  if (!weight.ends_with(kWeightKey)) return {};
  weight.remove_suffix(kWeightKey.size());
  const std::string_view name = weight.substr(weight.rfind('.') + 1);  // npos + 1 is 0
  const bool is_number = name.find_first_not_of("0123456789") == std::string_view::npos;
  return is_number ? std::string_view() : name;
}

/// Whether a tensor of an adapter can be a term of the sum for a tensor of the base.
bool can_be_added(const TensorMeta& tensor, const TensorMeta& target) {
  return tensor.shape == target.shape && can_be_summed(tensor.dtype) &&
         is_complex(tensor.dtype) == is_complex(target.dtype);
}

}  // namespace

LayerOrders::LayerOrders(const formats::CheckpointContents& contents) {
  for (const auto& tensor : contents.tensors) {
    const Shape& shape = tensor.meta.shape;
    const std::string& name = tensor.meta.fqn;
    if (!name.ends_with(kWeightKey) || shape.size() != 2 || shape[0] == shape[1]) continue;
    const std::string layer = name.substr(0, name.size() - kWeightKey.size());
    const auto* const bias = contents.find_tensor(layer + ".bias");
    if (bias == nullptr || bias->meta.shape.size() != 1) continue;
    const std::int64_t num_outputs = bias->meta.shape[0];
    if (num_outputs != shape[0] && num_outputs != shape[1]) continue;
    const bool is_in_out = num_outputs == shape[1];
    by_last_name_[std::string(last_name_of(name))].insert(is_in_out ? LayerOrder::in_out
                                                                    : LayerOrder::out_in);
    has_in_out_ = has_in_out_ || is_in_out;
  }
}

LayerOrder LayerOrders::of(std::string_view weight) const {
  const std::string_view last_name = last_name_of(weight);
  const auto named = by_last_name_.find(last_name);
  if (last_name.empty() || named == by_last_name_.end() || named->second.size() != 1) {
    return LayerOrder::unknown;
  }
  return *named->second.begin();
}

AdapterTargets::AdapterTargets(const formats::CheckpointReader& base,
                               const SelectedEntries& entries, const LoraAdapter& adapter,
                               const CombineOptions& options)
    : base_(base),
      entries_(entries),
      adapter_(adapter),
      options_(options),
      orders_(base.contents()),
      problems_(adapter.problems) {
  counts_.path = adapter.reader->path();
  for (const auto& tensor : base.contents().tensors) all_names_.insert(tensor.meta.fqn);
  for (const auto& alias : base.contents().aliases) all_names_.insert(alias.fqn);
  for (const std::string& name : all_names_) {
    const auto own = formats::parse_per_rank_name(name);
    if (own) names_of_ranks_[own->name].push_back(name);
  }
}

void AdapterTargets::problem(const std::string& name, const std::string& expected,
                             const std::string& found) {
  problems_.push_back(combine_problem(name, expected, found));
}

bool AdapterTargets::may_be_missing(const AdapterChange& change) const {
  return change.is_second_name ||
         (options_.has_tied_embeddings && embedding_end_of(change.target) == EmbeddingEnd::output);
}

std::string PrefixOfBase::applied_to(const std::string& target) const {
  return added + (target.starts_with(removed) ? target.substr(removed.size()) : target);
}

/// Returns the names of the tensors that the base must have: not of those that it may lack, unless
/// there are no others.
std::vector<const std::string*> AdapterTargets::needed_targets() const {
  std::vector<const std::string*> targets;
  for (const bool takes_all : {false, true}) {
    for (const AdapterChange& change : adapter_.changes) {
      if (takes_all ? !change.is_second_name : !may_be_missing(change)) {
        targets.push_back(&change.target);
      }
    }
    if (!targets.empty()) break;
  }
  return targets;
}

/// Returns the prefix, such as `model.`, that turns the adapter's names of tensors into the base's
/// names, or that the base lacks. Of several that fit, takes the one with selected tensors. Empty
/// if none is needed, if none fits all changed tensors, or if several do.
PrefixOfBase AdapterTargets::find_prefix() const {
  const std::vector<const std::string*> targets = needed_targets();
  if (targets.empty()) return {};
  const std::string& target = *targets.front();
  std::vector<std::string> prefixes;
  for (const std::string& name : all_names_) {
    if (name != target && !name.ends_with("." + target)) continue;
    if (formats::parse_per_rank_name(name)) continue;
    std::string prefix = name.substr(0, name.size() - target.size());
    const bool fits = std::ranges::all_of(
        targets, [&](const std::string* each) { return all_names_.contains(prefix + *each); });
    if (fits) prefixes.push_back(std::move(prefix));
  }
  const auto selects_none = [&](const std::string& prefix) {
    return std::ranges::none_of(adapter_.changes, [&](const AdapterChange& change) {
      return entries_.find_tensor(prefix + change.target).has_value();
    });
  };
  if (prefixes.empty()) return {.removed = find_removed_prefix(targets)};
  if (prefixes.size() > 1) std::erase_if(prefixes, selects_none);
  return {.added = prefixes.size() == 1 ? prefixes.front() : ""};
}

/// Returns the prefix that all `targets` begin with and that the base's names lack; empty if no
/// prefix fits, or several do. Example: the Hugging Face Hub's file of GPT-2 has `h.0.attn`, and
/// adapters have `transformer.h.0.attn`.
std::string AdapterTargets::find_removed_prefix(
    const std::vector<const std::string*>& targets) const {
  const std::string& first = *targets.front();
  std::vector<std::string> prefixes;
  for (std::size_t dot = first.find('.'); dot != std::string::npos;
       dot = first.find('.', dot + 1)) {
    const std::string prefix = first.substr(0, dot + 1);
    const bool fits = std::ranges::all_of(targets, [&](const std::string* each) {
      return each->starts_with(prefix) && all_names_.contains(each->substr(prefix.size()));
    });
    if (fits) prefixes.push_back(prefix);
  }
  return prefixes.size() == 1 ? prefixes.front() : "";
}

void AdapterTargets::add_to(std::vector<TensorOrigin>& tensors, Replacements& replaced) {
  const PrefixOfBase prefix = find_prefix();
  counts_.added_prefix = prefix.added;
  counts_.removed_prefix = prefix.removed;
  std::vector<const AdapterChange*> missing;
  for (const AdapterChange& change : adapter_.changes) {
    const std::string name = prefix.applied_to(change.target);
    if (!all_names_.contains(name)) {
      // Hugging Face's files have a tied tensor under its first name only.
      if (!change.is_second_name) missing.push_back(&change);
      continue;
    }
    add_to(tensors, replaced, change, name);
    const auto of_ranks = names_of_ranks_.find(name);
    if (of_ranks == names_of_ranks_.end()) continue;
    for (const std::string& own : of_ranks->second) add_to(tensors, replaced, change, own);
  }
  for (const AdapterChange* const change : missing) {
    match_missing(tensors, replaced, *change, prefix.applied_to(change->target));
  }
}

/// Returns the only tensor of the base that is the input embedding; nothing if there are several.
std::optional<std::size_t> AdapterTargets::find_input_embedding() const {
  std::optional<std::size_t> found;
  for (const auto& [name, index] : entries_.tensors()) {
    if (embedding_end_of(name) != EmbeddingEnd::input) continue;
    if (found) return std::nullopt;
    found = index;
  }
  return found;
}

/// Reports a change to a tensor that the base lacks, unless the tensor is the tied output layer and
/// becomes equal to the input embedding, which the base stores. Requires: all other changes are
/// added.
void AdapterTargets::match_missing(const std::vector<TensorOrigin>& tensors,
                                   const Replacements& replaced, const AdapterChange& change,
                                   const std::string& name) {
  const auto input = may_be_missing(change) ? find_input_embedding() : std::nullopt;
  if (!input) {
    return problem(name, "a tensor of this name, which " + printable(counts_.path) + " changes",
                   "none in " + printable(base_.path()));
  }
  if (std::holds_alternative<AsInFirst>(tensors[*input])) return;
  if (change.is_copy_of_base && adapter_.scale < 0.0) return;
  if (change.kind == AdapterChange::Kind::replaced) {
    const auto other = replaced.find(*input);
    const TensorReader stored =
        other == replaced.end() ? TensorReader(base_, *input) : other->second;
    if (have_equal_numbers(TensorReader(*adapter_.reader, change.tensor), stored)) return;
  }
  problem(name,
          "the same new tensor as for " + printable(base_.contents().tensors[*input].meta.fqn) +
              ", to which config.json ties this one",
          "another change in " + printable(counts_.path) + ", and no such tensor in " +
              printable(base_.path()) + " (store both in the base first: docs/combine.md)");
}

/// Adds a change to the tensor `name`, if it is selected.
void AdapterTargets::add_to(std::vector<TensorOrigin>& tensors, Replacements& replaced,
                            const AdapterChange& change, const std::string& name) {
  const auto index = entries_.find_tensor(name);
  if (!index || std::holds_alternative<AsInFirst>(tensors[*index])) return;
  if (change.kind == AdapterChange::Kind::replaced) {
    return replace(change, *index, tensors[*index], replaced);
  }
  // Layers that share their matrices may share the base's tensor too: it gets the change once.
  if (!added_.emplace(*index, change.tensor, change.down, change.up).second) return;
  changed_.insert(*index);
  const TensorMeta& target = base_.contents().tensors[*index].meta;
  auto* const sum = std::get_if<TensorSum>(&tensors[*index]);
  if (sum == nullptr) {
    return problem(target.fqn, "a floating-point or complex tensor, to which an adapter can add",
                   std::string(dtype_name(target.dtype)));
  }
  add(change, target, *sum);
}

void AdapterTargets::refuse_tensor(const TensorMeta& meta, const TensorMeta& target) {
  problem(target.fqn,
          std::string(dtype_name(target.dtype)) + " " + shape_to_string(target.shape) + ", as in " +
              printable(base_.path()),
          std::string(dtype_name(meta.dtype)) + " " + shape_to_string(meta.shape) + " in " +
              printable(counts_.path));
}

void AdapterTargets::add(const AdapterChange& change, const TensorMeta& target, TensorSum& sum) {
  if (!can_hold(options_.accumulation, change.scale)) {
    return problem(target.fqn,
                   "a scale of " + printable(counts_.path) + " that the dtype of the sum can hold",
                   tessera::detail::float_to_text(change.scale));
  }
  if (change.kind == AdapterChange::Kind::low_rank) return add_low_rank(change, target, sum);
  const TensorMeta& meta = adapter_.reader->contents().tensors[change.tensor].meta;
  if (!can_be_added(meta, target)) return refuse_tensor(meta, target);
  sum.add_after({TensorReader(*adapter_.reader, change.tensor), {.weight = change.scale}});
  ++counts_.num_changed;
}

/// Replaces the base's tensor `index`. A tensor that cannot be added up, such as a counter of
/// batches, is replaced by one of its dtype.
void AdapterTargets::replace(const AdapterChange& change, std::size_t index, TensorOrigin& origin,
                             Replacements& replaced) {
  const TensorMeta& target = base_.contents().tensors[index].meta;
  const formats::TensorEntry& entry = adapter_.reader->contents().tensors[change.tensor];
  auto* const sum = std::get_if<TensorSum>(&origin);
  const bool fits = sum != nullptr
                        ? can_be_added(entry.meta, target)
                        : entry.meta.shape == target.shape && entry.meta.dtype == target.dtype;
  // A change that is taken back was merged before, so the base no longer is what PEFT copied.
  if (change.is_copy_of_base && adapter_.scale < 0.0) return;
  if (!fits) return refuse_tensor(entry.meta, target);
  TensorReader tensor(*adapter_.reader, change.tensor);
  if (change.is_copy_of_base && have_equal_numbers(tensor, TensorReader(base_, index))) return;
  changed_.insert(index);
  if (adapter_.scale < 0.0) {
    return problem(target.fqn,
                   "a scale of " + printable(counts_.path) +
                       " that is not negative, because it replaces this tensor, and does not have "
                       "the one before",
                   tessera::detail::float_to_text(adapter_.scale));
  }
  const auto [place, is_new] = replaced.try_emplace(index, tensor);
  if (!is_new) {
    if (have_equal_numbers(place->second, tensor)) return;
    return problem(target.fqn, "one tensor of the adapters that replaces this one",
                   "a second one with other numbers: " + printable(entry.meta.fqn) + " in " +
                       printable(counts_.path));
  }
  if (sum != nullptr) {
    sum->replace_terms({std::move(tensor), {.weight = 1.0}});
  } else {
    origin.emplace<TensorReader>(std::move(tensor));
  }
  ++counts_.num_replaced;
}

void AdapterTargets::add_low_rank(const AdapterChange& change, const TensorMeta& target,
                                  TensorSum& sum) {
  const auto& tensors = adapter_.reader->contents().tensors;
  const TensorMeta& down = tensors[change.down].meta;
  const TensorMeta& up = tensors[change.up].meta;
  const std::int64_t rank = down.shape[0];
  const std::int64_t num_rows = target.shape.empty() ? 0 : target.shape[0];
  const std::int64_t num_columns = num_rows == 0 ? 0 : target.numel() / num_rows;
  const std::int64_t down_columns = down.numel() / rank;
  const bool fits = target.shape.size() >= 2 && up.shape[0] == num_rows &&
                    down_columns == num_columns && down.shape.size() == target.shape.size();
  const bool fits_transposed =
      target.shape.size() == 2 && up.shape[0] == num_columns && down_columns == num_rows;
  const bool has_numbers = can_be_summed(down.dtype) && can_be_summed(up.dtype) &&
                           !is_complex(down.dtype) && !is_complex(up.dtype) &&
                           !is_complex(target.dtype);
  if ((!fits && !fits_transposed) || !has_numbers) {
    return problem(target.fqn,
                   "matrices whose product is " + std::string(dtype_name(target.dtype)) + " " +
                       shape_to_string(target.shape),
                   std::string(dtype_name(up.dtype)) + " " + shape_to_string(up.shape) + " and " +
                       std::string(dtype_name(down.dtype)) + " " + shape_to_string(down.shape));
  }
  // If the product of the matrices and its transpose both fit, the weight is square.
  const bool is_square = fits && fits_transposed;
  const LayerOrder order = change.is_embedding ? LayerOrder::unknown : orders_.of(target.fqn);
  const bool is_said = change.is_embedding || change.is_said_to_be_transposed;
  if (!is_said && !fits && order != LayerOrder::in_out) {
    return problem(target.fqn,
                   "fan_in_fan_out: true in " + printable(counts_.path) +
                       ", because only the transpose of the matrices fits",
                   "false, or no such key");
  }
  if (!is_said && is_square && order == LayerOrder::unknown && orders_.has_in_out()) {
    return problem(target.fqn,
                   "fan_in_fan_out: true in " + printable(counts_.path) +
                       ", because the weight is square, and other layers are stored as [in, out]",
                   "false, or no such key");
  }
  // As in PEFT, the kind of the layer decides for a square weight, rather than the configuration.
  const bool is_transposed = !is_square                     ? fits_transposed
                             : order == LayerOrder::unknown ? is_said
                                                            : order == LayerOrder::in_out;
  sum.add_after(LowRankTerm{.down = TensorReader(*adapter_.reader, change.down),
                            .up = TensorReader(*adapter_.reader, change.up),
                            .is_transposed = is_transposed,
                            .scale = change.scale});
  ++counts_.num_changed;
}

}  // namespace tessera::arithmetic
