#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "recipe/block_tensor.h"

namespace tessera::recipe {

/// Concatenates `num_parts` tensors along `dim` (inverse: Split). Empty `sizes`: equal sizes.
struct Concat {
  std::int64_t dim = 0;
  std::vector<std::int64_t> sizes{};
  std::size_t num_parts = 0;
};
struct Split {
  std::int64_t dim = 0;
  std::vector<std::int64_t> sizes{};
  std::size_t num_parts = 0;  // number of slices; of equal size if `sizes` is empty
};
/// Concatenates `num_parts` tensors group by group (SplitGrouped is the inverse). Each tensor is
/// divided along `dim` into `groups` equal groups. The result has group 0 of each tensor, then
/// group 1 of each tensor, and so on, as Q, K and V are stored for grouped-query attention.
/// `sizes`: the whole size of each tensor along `dim`.
struct ConcatGrouped {
  std::int64_t dim = 0;
  std::int64_t groups = 1;
  std::vector<std::int64_t> sizes{};
  std::size_t num_parts = 0;
};
struct SplitGrouped {
  std::int64_t dim = 0;
  std::int64_t groups = 1;
  std::vector<std::int64_t> sizes{};
  std::size_t num_parts = 0;
};
/// Stacks tensors along a new dimension: one for each value 0, 1, … of a capture. Inverse: Unstack.
struct Stack {
  std::string capture;
  std::int64_t dim = 0;
};
struct Unstack {
  std::string capture;
  std::int64_t dim = 0;
};
/// Gives a tensor the shape `to`; the inverse gives it the shape `from`. One size may be -1, which
/// is computed.
struct Reshape {
  std::vector<std::int64_t> from{};
  std::vector<std::int64_t> to{};
};
/// Replaces a dimension by several; Flatten undoes it. One size may be -1, which is computed.
struct Unflatten {
  std::int64_t dim = 0;
  std::vector<std::int64_t> sizes{};
};
struct Flatten {
  std::int64_t dim = 0;
  std::vector<std::int64_t> sizes{};
};
/// Permutes dimensions: dimension `d` of the result is dimension `order[d]` of the tensor.
struct Permute {
  std::vector<std::int64_t> order{};
};
struct Transpose {
  std::int64_t first = 0;
  std::int64_t second = 1;
};
/// Keeps the positions `[begin, end)` of `dim`, and drops the others. A slice has no inverse.
struct Slice {
  std::int64_t dim = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};
/// The value of the padding elements that Pad adds at the end of a dimension and Unpad removes.
struct Filling {
  double value = 0;
  bool is_any = false;  // Pad writes 0; Unpad removes any value
};
struct Pad {
  std::int64_t dim = 0;
  std::int64_t from = 0;  // the size of `dim` without the padding
  std::int64_t to = 0;    // the size of `dim` with the padding
  Filling filling{};
};
/// The inverse of Pad: reduces `dim` from `to` positions to `from`.
struct Unpad {
  std::int64_t dim = 0;
  std::int64_t from = 0;
  std::int64_t to = 0;
  Filling filling{};
};
/// Makes `num_parts` copies of a tensor. MergeEqual makes one tensor of equal ones.
struct Duplicate {
  std::size_t num_parts = 0;
};
struct MergeEqual {
  std::size_t num_parts = 0;
};
/// Adds a number to each element, and rounds to the dtype.
struct Add {
  double value = 0;
};

using Operation =
    std::variant<Concat, Split, ConcatGrouped, SplitGrouped, Stack, Unstack, Reshape, Unflatten,
                 Flatten, Permute, Transpose, Slice, Pad, Unpad, Duplicate, MergeEqual, Add>;

/// Returns the name of an operation in a recipe: `split_grouped`.
std::string_view operation_name(const Operation& operation);

/// Returns the operation that undoes this one. Throws: ShapeProblem for a slice or a bad permute.
Operation inverse_of(const Operation& operation);

/// The tensors whose names fit one name template of a rule. If the rule stacks captures, there is
/// one tensor for each combination of their numbers.
struct Stream {
  std::vector<std::string> captures{};  // sorted
  /// The key is the numbers of `captures`.
  std::map<std::vector<std::int64_t>, BlockTensor> tensors{};
};

/// The recipe drops `tensor` (MergeEqual, or Unpad): its elements must equal those of `expected`.
struct Requirement {
  BlockTensor tensor;
  BlockTensor expected;
};

/// The kind of a tensor: a parameter, or optimizer state of a parameter. Some operations treat them
/// differently.
enum class Subject {
  parameter,
  pointwise_state,  // `add` does not change it, and it is padded with zeros
};

/// Results of `apply` besides the new tensors.
struct Applied {
  std::vector<Requirement> requirements{};
  std::int64_t num_dropped = 0;  // elements that slices and unpads of any value drop
};

/// Applies an operation to the streams of a rule. Throws: ShapeProblem.
void apply(const Operation& operation, Subject subject, std::vector<Stream>& streams,
           Applied& applied);

}  // namespace tessera::recipe
