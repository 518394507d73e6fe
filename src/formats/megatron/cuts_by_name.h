#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::formats::megatron {

/// The end of the names of extra state: pickled bytes that a layer has beside its tensors.
inline constexpr std::string_view kExtraState = "_extra_state";

/// How tensor parallelism cuts a tensor.
enum class Cut {
  first_dimension,   // ColumnParallelLinear, embeddings of the vocabulary
  second_dimension,  // RowParallelLinear
  whole,             // each tensor rank has all of it
  not_joined,        // cut in another way, which this reader does not undo
  no_rule,           // not a name of a tensor in Megatron's layers
};

/// Returns how Megatron cuts the tensor of that name among the tensor-parallel ranks.
/// docs/formats/megatron.md lists the names.
Cut cut_of(std::string_view name);

/// If `name` is a weight or bias of the first layer of an MLP, returns the name of the second
/// layer's weight: `mlp.linear_fc2.weight` for `mlp.linear_fc1.bias`. Otherwise nothing. In a gated
/// MLP (SwiGLU), the first layer has twice as many rows as the second layer has columns, and each
/// tensor-parallel rank has its part of the gate, followed by its part of the up projection.
std::optional<std::string> second_of_perceptron(std::string_view name);

/// Returns whether the tensor's module, the component before the last one, has this name.
bool is_of_module(std::string_view name, std::string_view module);
/// Whether the tensor belongs to the experts that all tokens use (`shared_experts`).
bool is_of_shared_expert(std::string_view name);

/// A number in a name: `<before><number><after>`.
struct NumberInName {
  std::string before;
  std::size_t number = 0;
  std::string after;

  std::string with(std::size_t other) const { return before + std::to_string(other) + after; }
};

/// Returns a layer's number within its model chunk: the one after the first `layers.`, if any.
std::optional<NumberInName> layer_in(std::string_view name);
/// Returns the number of an expert within its rank: 3 in `experts.local_experts.3.…` and in
/// `experts.linear_fc1.weight3`. Nothing if the name has none.
std::optional<NumberInName> expert_in(std::string_view name);
/// Whether the tensor belongs to an expert. Other expert-parallel ranks then have other experts
/// under the same name.
bool is_of_expert(std::string_view name);
/// Whether the tensor is a buffer, not a parameter: the optimizer has no state for it.
bool is_buffer(std::string_view name);

}  // namespace tessera::formats::megatron
