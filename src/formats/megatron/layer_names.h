#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::formats::megatron {

/// How tensor parallelism cuts a tensor.
enum class Cut {
  first_dimension,   // ColumnParallelLinear, embeddings of the vocabulary
  second_dimension,  // RowParallelLinear
  whole,             // each tensor rank has all of it
  not_joined,        // known to be cut in a way that this reader does not undo
  no_rule,           // a name that Megatron's layers do not have
};

/// Returns how Megatron's layers cut the tensor of that name. docs/formats/megatron.md lists the
/// names.
Cut cut_of(std::string_view name);

/// Returns the name of the second layer of the same perceptron, if `name` is a weight or bias of
/// its first layer: `mlp.linear_fc2.weight` for `mlp.linear_fc1.bias`. The first layer has twice
/// the columns of the second one if it also computes a gate. Then each tensor rank has a part of
/// the gate, and behind it a part of the rest.
std::optional<std::string> second_of_perceptron(std::string_view name);

/// A number in a name: `<before><number><after>`.
struct NumberInName {
  std::string before;
  std::size_t number = 0;
  std::string after;

  std::string with(std::size_t other) const { return before + std::to_string(other) + after; }
};

/// Returns the number of a layer on its stage: that behind the first `layers.`.
std::optional<NumberInName> layer_in(std::string_view name);
/// Returns the number of an expert on its rank: `experts.local_experts.3.…`, or
/// `experts.linear_fc1.weight3`.
std::optional<NumberInName> expert_in(std::string_view name);
/// Whether the tensor belongs to an expert, so that other ranks have those of other experts.
bool is_of_expert(std::string_view name);
/// Whether the tensor is no parameter: the optimizer has no state of it.
bool is_buffer(std::string_view name);

}  // namespace tessera::formats::megatron
