#include "arithmetic/adapter_targets.h"

#include <algorithm>
#include <map>
#include <utility>
#include <variant>

#include "arithmetic/element_sum.h"
#include "base/float_text.h"
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
                               Accumulation accumulation)
    : base_(base),
      entries_(entries),
      adapter_(adapter),
      accumulation_(accumulation),
      orders_(base.contents()),
      problems_(adapter.problems) {
  counts_.path = adapter.reader->path();
  for (const auto& tensor : base.contents().tensors) all_names_.insert(tensor.meta.fqn);
  for (const auto& alias : base.contents().aliases) all_names_.insert(alias.fqn);
}

void AdapterTargets::problem(const std::string& name, const std::string& expected,
                             const std::string& found) {
  problems_.push_back(combine_problem(name, expected, found));
}

/// Returns the prefix, such as `model.`, that turns the adapter's names of tensors into the base's
/// names. Empty if none is needed, if none fits all changed tensors, or if several do.
std::string AdapterTargets::find_prefix() const {
  const auto has_all = [&](const std::string& prefix) {
    return std::ranges::all_of(adapter_.changes, [&](const AdapterChange& change) {
      return change.is_second_name || all_names_.contains(prefix + change.target);
    });
  };
  if (adapter_.changes.empty() || has_all("")) return {};
  const std::string& target =
      std::ranges::find(adapter_.changes, false, &AdapterChange::is_second_name)->target;
  std::vector<std::string> prefixes;
  for (const std::string& name : all_names_) {
    if (!name.ends_with("." + target)) continue;
    std::string prefix = name.substr(0, name.size() - target.size());
    if (has_all(prefix)) prefixes.push_back(std::move(prefix));
  }
  return prefixes.size() == 1 ? prefixes.front() : "";
}

void AdapterTargets::add_to(std::vector<TensorOrigin>& tensors, std::set<std::size_t>& replaced) {
  const std::string prefix = find_prefix();
  std::map<std::size_t, std::size_t> own_replaced;  // tensor of the base -> of this adapter
  for (const AdapterChange& change : adapter_.changes) {
    const std::string name = prefix + change.target;
    if (!all_names_.contains(name)) {
      // Hugging Face's files have a tied tensor under its first name only.
      if (change.is_second_name) continue;
      problem(name, "a tensor of this name, which " + printable(counts_.path) + " changes",
              "none in " + printable(base_.path()));
      continue;
    }
    const auto index = entries_.find_tensor(name);
    if (!index || std::holds_alternative<AsInFirst>(tensors[*index])) continue;
    changed_.insert(*index);
    if (change.kind == AdapterChange::Kind::replaced) {
      const auto [first, is_first] = own_replaced.emplace(*index, change.tensor);
      if (!is_first && first->second == change.tensor) continue;  // tied in base and adapter
    }
    const bool is_new =
        change.kind != AdapterChange::Kind::replaced || replaced.insert(*index).second;
    add(change, base_.contents().tensors[*index].meta, tensors[*index], is_new);
  }
}

void AdapterTargets::add(const AdapterChange& change, const TensorMeta& target,
                         TensorOrigin& origin, bool is_new) {
  const auto whole = [&](std::size_t tensor) { return TensorReader(*adapter_.reader, tensor); };
  auto* const sum = std::get_if<TensorSum>(&origin);
  if (sum == nullptr && change.kind == AdapterChange::Kind::replaced) {
    return replace(change, target, origin, is_new);
  }
  if (sum == nullptr) {
    return problem(target.fqn, "a floating-point or complex tensor, to which an adapter can add",
                   std::string(dtype_name(target.dtype)));
  }
  if (!can_hold(accumulation_, change.scale)) {
    return problem(target.fqn,
                   "a scale of " + printable(counts_.path) + " that the dtype of the sum can hold",
                   tessera::detail::float_to_text(change.scale));
  }
  if (change.kind == AdapterChange::Kind::low_rank) return add_low_rank(change, target, *sum);
  const TensorMeta& meta = adapter_.reader->contents().tensors[change.tensor].meta;
  if (meta.shape != target.shape || !can_be_summed(meta.dtype) ||
      is_complex(meta.dtype) != is_complex(target.dtype)) {
    return problem(target.fqn,
                   std::string(dtype_name(target.dtype)) + " " + shape_to_string(target.shape) +
                       ", as in " + printable(base_.path()),
                   std::string(dtype_name(meta.dtype)) + " " + shape_to_string(meta.shape) +
                       " in " + printable(counts_.path));
  }
  if (change.kind == AdapterChange::Kind::scaled) {
    sum->add_after({whole(change.tensor), {.weight = change.scale}});
    ++counts_.num_changed;
    return;
  }
  if (!is_new) {
    return problem(target.fqn, "one adapter that replaces this tensor", "a second adapter");
  }
  sum->replace_terms({whole(change.tensor), {.weight = 1.0}});
  ++counts_.num_replaced;
}

/// Replaces a tensor that cannot be added up, such as a counter of batches.
void AdapterTargets::replace(const AdapterChange& change, const TensorMeta& target,
                             TensorOrigin& origin, bool is_new) {
  const TensorMeta& meta = adapter_.reader->contents().tensors[change.tensor].meta;
  if (meta.shape != target.shape || meta.dtype != target.dtype) {
    return problem(target.fqn,
                   std::string(dtype_name(target.dtype)) + " " + shape_to_string(target.shape) +
                       ", as in " + printable(base_.path()),
                   std::string(dtype_name(meta.dtype)) + " " + shape_to_string(meta.shape) +
                       " in " + printable(counts_.path));
  }
  if (!is_new) {
    return problem(target.fqn, "one adapter that replaces this tensor", "a second adapter");
  }
  origin.emplace<TensorReader>(*adapter_.reader, change.tensor);
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
