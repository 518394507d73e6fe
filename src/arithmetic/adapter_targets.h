#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "arithmetic/combination.h"
#include "arithmetic/combined_reader.h"
#include "arithmetic/lora_adapter.h"
#include "arithmetic/source_match.h"

namespace tessera::arithmetic {

/// How a layer stores its weight.
enum class LayerOrder {
  unknown,
  out_in,  // [out, in], as torch.nn.Linear stores it
  in_out,  // [in, out], as the Conv1D of transformers stores it (GPT-2)
};

/// How the layers of a model store their weights. A layer shows this if it has a bias and its
/// weight is not square: the length of the bias is `out`.
class LayerOrders {
 public:
  explicit LayerOrders(const formats::CheckpointContents& contents);

  /// Returns how layers with the last name of `weight` (`c_proj` of `h.0.c_proj.weight`) store
  /// their weights. Unknown if that name is a number, if no layer shows it, or if layers disagree.
  LayerOrder of(std::string_view weight) const;
  /// Whether any layer of the model stores its weight as [in, out].
  bool has_in_out() const { return has_in_out_; }

 private:
  std::map<std::string, std::set<LayerOrder>, std::less<>> by_last_name_;
  bool has_in_out_ = false;
};

/// The tensors that replace those of the base, by the index of the base's tensor.
using Replacements = std::map<std::size_t, inspect::TensorReader>;

/// How the names of a base model's tensors differ from those of an adapter.
struct PrefixOfBase {
  std::string added{};    // that only the base has
  std::string removed{};  // that only the adapter has

  /// Returns the base's name of a tensor.
  std::string applied_to(const std::string& target) const;
};

/// The tensors of a base model that a LoRA adapter changes. The base's names may have a prefix that
/// the adapter's names lack, such as `model.`, or lack one. This class finds the prefix if it is
/// the same for all these tensors.
class AdapterTargets {
 public:
  /// Keeps references to all arguments.
  AdapterTargets(const formats::CheckpointReader& base, const SelectedEntries& entries,
                 const LoraAdapter& adapter, const CombineOptions& options);

  /// Adds the adapter's changes to the sums in `tensors`, which is parallel to the base's tensors.
  /// Adds the tensors that replace others to `replaced`. Skips AsInFirst tensors.
  void add_to(std::vector<TensorOrigin>& tensors, Replacements& replaced);

  const std::vector<formats::Finding>& problems() const { return problems_; }
  const AdapterCounts& counts() const { return counts_; }
  /// The indices of the base's tensors that the adapter changes.
  const std::set<std::size_t>& changed() const { return changed_; }

 private:
  /// Whether the base may lack the tensor of a change, because it stores a tied tensor once.
  bool may_be_missing(const AdapterChange& change) const;
  std::vector<const std::string*> needed_targets() const;
  PrefixOfBase find_prefix() const;
  std::string find_removed_prefix(const std::vector<const std::string*>& targets) const;
  void add_to(std::vector<TensorOrigin>& tensors, Replacements& replaced,
              const AdapterChange& change, const std::string& name);
  void match_missing(const std::vector<TensorOrigin>& tensors, const Replacements& replaced,
                     const AdapterChange& change, const std::string& name);
  std::optional<std::size_t> find_input_embedding() const;
  void add(const AdapterChange& change, const TensorMeta& target, TensorSum& sum);
  void replace(const AdapterChange& change, std::size_t index, TensorOrigin& origin,
               Replacements& replaced);
  void add_low_rank(const AdapterChange& change, const TensorMeta& target, TensorSum& sum);
  /// Reports that a tensor of the adapter has not the shape or the kind of numbers of its target.
  void refuse_tensor(const TensorMeta& meta, const TensorMeta& target);
  void problem(const std::string& name, const std::string& expected, const std::string& found);

  const formats::CheckpointReader& base_;
  const SelectedEntries& entries_;
  const LoraAdapter& adapter_;
  const CombineOptions& options_;
  const LayerOrders orders_;
  std::set<std::string, std::less<>> all_names_;  // of the base, also those that are not selected
  /// The names `per_rank.<rank>.<name>`, by `<name>` (see [Note: Entries of each rank]).
  std::map<std::string, std::vector<std::string>> names_of_ranks_;
  std::vector<formats::Finding> problems_;
  AdapterCounts counts_;
  std::set<std::size_t> changed_;
  /// What was added: the base's tensor, and the adapter's tensors.
  std::set<std::tuple<std::size_t, std::size_t, std::size_t, std::size_t>> added_;
};

}  // namespace tessera::arithmetic
