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

/// Concatenates several tensors along `dim`. Without `sizes`, all have the same size.
struct Concat {
  std::int64_t dim = 0;
  std::vector<std::int64_t> sizes{};
  std::size_t num_parts = 0;
};
struct Split {
  std::int64_t dim = 0;
  std::vector<std::int64_t> sizes{};
  std::size_t num_parts = 0;
};
/// Concatenates within each of `groups` equal groups of `dim`: group 0 of each tensor, then group 1
/// of each tensor, … as grouped-query attention stores Q, K and V. `sizes`: of the tensors that are
/// concatenated, over all groups.
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
/// Stacks the tensors of all values of a capture (0, 1, …) along a new dimension.
struct Stack {
  std::string capture;
  std::int64_t dim = 0;
};
struct Unstack {
  std::string capture;
  std::int64_t dim = 0;
};
/// Gives a tensor other sizes: `to`, in the inverse `from`. One size may be -1: it is computed.
struct Reshape {
  std::vector<std::int64_t> from{};
  std::vector<std::int64_t> to{};
};
/// Replaces a dimension by several dimensions. One size may be -1: it is computed.
struct Unflatten {
  std::int64_t dim = 0;
  std::vector<std::int64_t> sizes{};
};
struct Flatten {
  std::int64_t dim = 0;
  std::vector<std::int64_t> sizes{};
};
/// Dimension `d` of the result is dimension `order[d]`.
struct Permute {
  std::vector<std::int64_t> order{};
};
struct Transpose {
  std::int64_t first = 0;
  std::int64_t second = 1;
};
/// Elements `[begin, end)` along `dim`. The others are dropped, so it cannot be undone.
struct Slice {
  std::int64_t dim = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};
/// The elements after the first `from` along `dim`: those that Pad adds and Unpad removes.
struct Filling {
  double value = 0;
  bool is_any = false;  // if so, Pad writes 0, and Unpad accepts any value
};
struct Pad {
  std::int64_t dim = 0;
  std::int64_t from = 0;
  std::int64_t to = 0;
  Filling filling{};
};
/// The inverse of Pad: `to` elements along `dim` become `from`.
struct Unpad {
  std::int64_t dim = 0;
  std::int64_t from = 0;
  std::int64_t to = 0;
  Filling filling{};
};
/// Makes several equal tensors of one.
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

/// Returns the word of an operation in a recipe: `split_grouped`.
std::string_view operation_name(const Operation& operation);

/// Returns the operation that undoes this one. Throws: ShapeProblem for a slice.
Operation inverse_of(const Operation& operation);

/// The tensors of one name template of a rule, by the values of the captures that are stacked.
struct Stream {
  std::vector<std::string> captures{};                         // sorted
  std::map<std::vector<std::int64_t>, BlockTensor> tensors{};  // by values, parallel to captures
};

/// Two tensors whose elements must be equal, or the recipe would lose something.
struct Requirement {
  BlockTensor tensor;
  BlockTensor expected;
};

/// Whether a tensor is a parameter or state of one. Some operations treat them differently.
enum class Subject {
  parameter,
  pointwise_state,  // `add` does not change it, and it is padded with zeros
};

/// What `apply` found besides the new tensors.
struct Applied {
  std::vector<Requirement> requirements{};
  std::int64_t num_dropped = 0;  // elements of slices, and of paddings of any value
};

/// Applies an operation to the streams of a rule. Throws: ShapeProblem.
void apply(const Operation& operation, Subject subject, std::vector<Stream>& streams,
           Applied& applied);

}  // namespace tessera::recipe
