#include "recipe/operation.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

#include "base/cast.h"
#include "base/checked_math.h"
#include "tessera/base/error.h"

namespace tessera::recipe {
namespace {

template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};

std::string sizes_in_words(std::span<const std::int64_t> sizes) {
  return shape_to_string(sizes);
}

/// Returns the sum of sizes. Throws if a size is below 0.
std::int64_t sum_of(std::span<const std::int64_t> sizes) {
  std::int64_t sum = 0;
  for (const std::int64_t size : sizes) {
    const auto next = size < 0 ? std::nullopt : checked_add(sum, size);
    if (!next) throw ShapeProblem("sizes of 0 or more", sizes_in_words(sizes));
    sum = *next;
  }
  return sum;
}

/// Returns the sizes of the parts of a dimension: `sizes`; if that is empty, `num_parts` equal
/// sizes.
std::vector<std::int64_t> part_sizes(const std::vector<std::int64_t>& sizes, std::size_t num_parts,
                                     std::int64_t size) {
  if (!sizes.empty()) {
    if (sum_of(sizes) == size) return sizes;
    throw ShapeProblem("sizes that add up to " + std::to_string(size), sizes_in_words(sizes));
  }
  const auto count = static_cast<std::int64_t>(num_parts);
  if (size % count != 0) {
    throw ShapeProblem("a multiple of " + std::to_string(count) + ", or a member \"sizes\"",
                       std::to_string(size));
  }
  return std::vector<std::int64_t>(num_parts, size / count);
}

/// Throws if the parts of a concat do not have the sizes that the recipe states, because the
/// inverse (a split) uses the stated sizes.
void check_part_sizes(const std::vector<std::int64_t>& sizes,
                      const std::vector<std::int64_t>& found) {
  if (!sizes.empty()) {
    if (found == sizes) return;
    throw ShapeProblem("parts of sizes " + sizes_in_words(sizes), sizes_in_words(found));
  }
  if (std::ranges::adjacent_find(found, std::not_equal_to()) == found.end()) return;
  throw ShapeProblem("parts of equal size, or a member \"sizes\"", sizes_in_words(found));
}

/// Returns `sizes` with -1 replaced by the size that makes their product `numel`.
Shape resolved(const std::vector<std::int64_t>& sizes, std::int64_t numel) {
  Shape shape;
  std::optional<std::size_t> open;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == -1 && !open) {
      open = i;
      shape.push_back(1);
    } else {
      shape.push_back(sizes[i]);
    }
  }
  const auto known = checked_numel(shape);
  const bool fits = known && (open ? *known > 0 && numel % *known == 0 : *known == numel);
  if (!fits) {
    throw ShapeProblem("sizes with the product " + std::to_string(numel), sizes_in_words(sizes));
  }
  if (open) shape[*open] = numel / *known;
  return shape;
}

/// Returns the size of a dimension in each tensor. Throws if a tensor lacks the dimension.
std::vector<std::int64_t> sizes_along(const std::vector<BlockTensor>& tensors, std::size_t dim) {
  std::vector<std::int64_t> sizes;
  for (const BlockTensor& tensor : tensors) {
    sizes.push_back(tensor.shape[dim_of(static_cast<std::int64_t>(dim), tensor.shape.size())]);
  }
  return sizes;
}

BlockTensor unflatten_dim(BlockTensor tensor, std::int64_t dim,
                          const std::vector<std::int64_t>& sizes) {
  const std::size_t d = dim_of(dim, tensor.shape.size());
  const Shape inner = resolved(sizes, tensor.shape[d]);
  return unflatten(std::move(tensor), d, inner);
}

BlockTensor flatten_dims(BlockTensor tensor, std::int64_t dim,
                         const std::vector<std::int64_t>& sizes) {
  const std::size_t num_dims = tensor.shape.size();
  const std::size_t d = dim_of(dim, num_dims);
  if (sizes.size() > num_dims - d) {
    throw ShapeProblem(std::to_string(sizes.size()) + " dimensions from " + std::to_string(d),
                       shape_to_string(tensor.shape));
  }
  const Shape found(tensor.shape.begin() + d, tensor.shape.begin() + d + sizes.size());
  if (resolved(sizes, numel_of(found)) != found) {
    throw ShapeProblem("sizes " + sizes_in_words(sizes) + " from dimension " + std::to_string(d),
                       shape_to_string(tensor.shape));
  }
  return flatten(std::move(tensor), d, sizes.size());
}

BlockTensor reshape_whole(BlockTensor tensor, const Reshape& op) {
  const std::int64_t numel = numel_of(tensor.shape);
  if (resolved(op.from, numel) != tensor.shape) {
    throw ShapeProblem("a tensor of shape " + sizes_in_words(op.from),
                       shape_to_string(tensor.shape));
  }
  const Shape shape = resolved(op.to, numel);
  return reshape(std::move(tensor), shape);
}

std::vector<std::size_t> checked_order(const std::vector<std::int64_t>& order,
                                       std::size_t num_dims) {
  std::vector<std::size_t> result;
  std::vector<bool> seen(num_dims);
  for (const std::int64_t d : order) {
    const bool is_new =
        d >= 0 && d < static_cast<std::int64_t>(num_dims) && !seen[static_cast<std::size_t>(d)];
    if (!is_new) break;
    seen[static_cast<std::size_t>(d)] = true;
    result.push_back(static_cast<std::size_t>(d));
  }
  if (result.size() == num_dims && order.size() == num_dims) return result;
  throw ShapeProblem("the " + std::to_string(num_dims) + " dimensions, each once",
                     sizes_in_words(order));
}

BlockTensor transposed(BlockTensor tensor, const Transpose& op) {
  std::vector<std::size_t> order(tensor.shape.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::swap(order[dim_of(op.first, order.size())], order[dim_of(op.second, order.size())]);
  return permute(std::move(tensor), order);
}

std::vector<BlockTensor> split_one(const BlockTensor& tensor, const Split& op) {
  const std::size_t d = dim_of(op.dim, tensor.shape.size());
  return cut(tensor, d, part_sizes(op.sizes, op.num_parts, tensor.shape[d]));
}

BlockTensor concat_one(std::vector<BlockTensor> parts, const Concat& op) {
  const std::size_t d = dim_of(op.dim, parts.front().shape.size());
  check_part_sizes(op.sizes, sizes_along(parts, d));
  return concat(std::move(parts), d);
}

/// Throws if `groups` is below 1 or does not divide all sizes.
void check_groups(std::int64_t groups, std::span<const std::int64_t> sizes) {
  const bool divides = groups > 0 && std::ranges::all_of(sizes, [&](std::int64_t size) {
                         return size % groups == 0;
                       });
  if (divides) return;
  throw ShapeProblem("sizes that are multiples of the number of groups, " + std::to_string(groups),
                     sizes_in_words(sizes));
}

BlockTensor concat_groups(std::vector<BlockTensor> parts, const ConcatGrouped& op) {
  const std::size_t d = dim_of(op.dim, parts.front().shape.size());
  const std::vector<std::int64_t> sizes = sizes_along(parts, d);
  check_part_sizes(op.sizes, sizes);
  check_groups(op.groups, sizes);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::int64_t inner[] = {op.groups, sizes[i] / op.groups};
    parts[i] = unflatten(std::move(parts[i]), d, inner);
  }
  return flatten(concat(std::move(parts), d + 1), d, 2);
}

std::vector<BlockTensor> split_groups(BlockTensor tensor, const SplitGrouped& op) {
  const std::size_t d = dim_of(op.dim, tensor.shape.size());
  std::vector<std::int64_t> sizes = part_sizes(op.sizes, op.num_parts, tensor.shape[d]);
  check_groups(op.groups, sizes);
  for (std::int64_t& size : sizes) size /= op.groups;
  const std::int64_t inner[] = {op.groups, tensor.shape[d] / op.groups};
  std::vector<BlockTensor> parts = cut(unflatten(std::move(tensor), d, inner), d + 1, sizes);
  for (BlockTensor& part : parts) part = flatten(std::move(part), d, 2);
  return parts;
}

// Operations on streams (a stream: the tensors of one name template of a rule)

/// Replaces each tensor by the result of `function`.
void map_tensors(std::vector<Stream>& streams,
                 const std::function<BlockTensor(BlockTensor)>& function) {
  for (Stream& stream : streams) {
    for (auto& [key, tensor] : stream.tensors) tensor = function(std::move(tensor));
  }
}

/// Joins all streams (one for each name template) into one. For each combination of captured
/// numbers, `function` makes one tensor from the tensors that the streams have for these numbers.
void join_streams(std::vector<Stream>& streams,
                  const std::function<BlockTensor(std::vector<BlockTensor>)>& function) {
  Stream joined{streams.front().captures, {}};
  for (auto& [key, tensor] : streams.front().tensors) {
    std::vector<BlockTensor> parts;
    for (Stream& stream : streams) {
      const auto found = stream.tensors.find(key);
      if (found == stream.tensors.end() ||
          stream.tensors.size() != streams.front().tensors.size()) {
        throw ShapeProblem("the same number of tensors for each name of \"from\"",
                           "different numbers");
      }
      parts.push_back(std::move(found->second));
    }
    joined.tensors.emplace(key, function(std::move(parts)));
  }
  streams = {std::move(joined)};
}

/// Splits one stream (the tensors of one name template) into `num_parts` streams. `function` makes
/// `num_parts` tensors from each tensor.
void fork_stream(std::vector<Stream>& streams, std::size_t num_parts,
                 const std::function<std::vector<BlockTensor>(BlockTensor)>& function) {
  TESSERA_CHECK(streams.size() == 1);  // the parser has checked their number
  std::vector<Stream> forked(num_parts, Stream{streams.front().captures, {}});
  for (auto& [key, tensor] : streams.front().tensors) {
    std::vector<BlockTensor> parts = function(std::move(tensor));
    TESSERA_CHECK(parts.size() == num_parts);
    for (std::size_t i = 0; i < num_parts; ++i) forked[i].tensors.emplace(key, std::move(parts[i]));
  }
  streams = std::move(forked);
}

Stream stacked(Stream stream, const Stack& op) {
  const auto place = std::ranges::find(stream.captures, op.capture) - stream.captures.begin();
  TESSERA_CHECK(place <
                std::ssize(stream.captures));  // the parser has checked that the capture exists
  std::map<std::vector<std::int64_t>, std::vector<BlockTensor>> groups;
  for (auto& [key, tensor] : stream.tensors) {
    std::vector<std::int64_t> rest = key;
    rest.erase(rest.begin() + place);
    std::vector<BlockTensor>& group = groups[rest];  // the keys are sorted, so numbers ascend
    if (key[static_cast<std::size_t>(place)] != std::ssize(group)) {
      throw ShapeProblem("{" + op.capture + "} from 0 without a gap",
                         std::to_string(key[static_cast<std::size_t>(place)]) + " in place of " +
                             std::to_string(group.size()));
    }
    group.push_back(std::move(tensor));
  }
  Stream result;
  result.captures = stream.captures;
  result.captures.erase(result.captures.begin() + place);
  for (auto& [key, group] : groups) {
    if (group.size() != groups.begin()->second.size()) {
      throw ShapeProblem(
          "the same number of {" + op.capture + "} everywhere",
          std::to_string(groups.begin()->second.size()) + " and " + std::to_string(group.size()));
    }
  }
  for (auto& [key, group] : groups) {
    const std::size_t d = dim_of(op.dim, group.front().shape.size() + 1);
    result.tensors.emplace(key, stack(std::move(group), d));
  }
  return result;
}

Stream unstacked(Stream stream, const Unstack& op) {
  Stream result;
  result.captures = stream.captures;
  const auto place = std::ranges::lower_bound(result.captures, op.capture);
  const auto at = place - result.captures.begin();
  result.captures.insert(place, op.capture);
  for (auto& [key, tensor] : stream.tensors) {
    const std::size_t d = dim_of(op.dim, tensor.shape.size());
    std::int64_t number = 0;
    for (BlockTensor& slice : cut_slices(tensor, d)) {
      std::vector<std::int64_t> with = key;
      with.insert(with.begin() + at, number++);
      result.tensors.emplace(std::move(with), std::move(slice));
    }
  }
  return result;
}

// Operations that remove or add elements

BlockTensor sliced(const BlockTensor& tensor, const Slice& op, Applied& applied) {
  const std::size_t d = dim_of(op.dim, tensor.shape.size());
  const std::int64_t size = tensor.shape[d];
  if (op.begin < 0 || op.end < op.begin || op.end > size) {
    throw ShapeProblem("a range within [0, " + std::to_string(size) + ")",
                       "[" + std::to_string(op.begin) + ", " + std::to_string(op.end) + ")");
  }
  const std::int64_t sizes[] = {op.begin, op.end - op.begin, size - op.end};
  std::vector<BlockTensor> parts = cut(tensor, d, sizes);
  applied.num_dropped += numel_of(parts[0].shape) + numel_of(parts[2].shape);
  return std::move(parts[1]);
}

void check_padding(std::int64_t from, std::int64_t to, std::int64_t expected, std::int64_t size) {
  if (from < 0 || to < from) {
    throw ShapeProblem("a \"to\" that is not smaller than \"from\"",
                       "\"from\" " + std::to_string(from) + ", \"to\" " + std::to_string(to));
  }
  if (size == expected) return;
  throw ShapeProblem("a size of " + std::to_string(expected), std::to_string(size));
}

BlockTensor padded(BlockTensor tensor, const Pad& op, Subject subject) {
  const std::size_t d = dim_of(op.dim, tensor.shape.size());
  check_padding(op.from, op.to, op.from, tensor.shape[d]);
  Shape shape = tensor.shape;
  shape[d] = op.to;
  const auto numel = checked_numel(shape);
  if (!numel || !checked_mul(*numel, static_cast<std::int64_t>(itemsize(tensor.dtype)))) {
    throw ShapeProblem("a tensor of fewer than 2^63 bytes", shape_to_string(shape));
  }
  shape[d] = op.to - op.from;
  const bool is_zero = op.filling.is_any || subject == Subject::pointwise_state;
  std::vector<BlockTensor> parts;
  parts.push_back(std::move(tensor));
  parts.push_back(constant_tensor(parts[0].dtype, shape, is_zero ? 0 : op.filling.value));
  return concat(std::move(parts), d);
}

BlockTensor unpadded(const BlockTensor& tensor, const Unpad& op, Subject subject,
                     Applied& applied) {
  const std::size_t d = dim_of(op.dim, tensor.shape.size());
  check_padding(op.from, op.to, op.to, tensor.shape[d]);
  const std::int64_t sizes[] = {op.from, op.to - op.from};
  std::vector<BlockTensor> parts = cut(tensor, d, sizes);
  if (op.filling.is_any) {
    for (const Block& block : parts[1].blocks) {
      if (block.source != kConstant) applied.num_dropped += block.box.numel();
    }
  } else {
    const double value = subject == Subject::pointwise_state ? 0 : op.filling.value;
    BlockTensor expected = constant_tensor(tensor.dtype, parts[1].shape, value);
    applied.requirements.push_back({std::move(parts[1]), std::move(expected)});
  }
  return std::move(parts[0]);
}

BlockTensor merge_equal(std::vector<BlockTensor> parts, Applied& applied) {
  for (std::size_t i = 1; i < parts.size(); ++i) {
    if (parts[i].shape != parts[0].shape || parts[i].dtype != parts[0].dtype) {
      throw ShapeProblem(
          "tensors of one shape and dtype",
          shape_to_string(parts[0].shape) + " and " + shape_to_string(parts[i].shape));
    }
    if (!have_same_blocks(parts[0], parts[i])) {
      applied.requirements.push_back({std::move(parts[i]), parts[0]});
    }
  }
  return std::move(parts[0]);
}

BlockTensor added_to(BlockTensor tensor, const Add& op, Subject subject) {
  if (subject == Subject::pointwise_state) return tensor;
  if (!is_floating_point(tensor.dtype) || !can_cast(tensor.dtype, DType::float64) ||
      !can_cast(DType::float64, tensor.dtype)) {
    throw ShapeProblem("a floating-point tensor of a dtype to which sums can be rounded",
                       std::string(dtype_name(tensor.dtype)));
  }
  for (Block& block : tensor.blocks) block.added += op.value;
  return tensor;
}

}  // namespace

std::string_view operation_name(const Operation& operation) {
  constexpr std::string_view kNames[] = {
      "concat",  "split",     "concat_grouped", "split_grouped", "stack",     "unstack",
      "reshape", "unflatten", "flatten",        "permute",       "transpose", "slice",
      "pad",     "unpad",     "duplicate",      "merge_equal",   "add"};
  static_assert(std::size(kNames) == std::variant_size_v<Operation>);
  return kNames[operation.index()];
}

Operation inverse_of(const Operation& operation) {
  return std::visit(
      Overloaded{[](const Concat& op) -> Operation {
                   return Split{op.dim, op.sizes, op.num_parts};
                 },
                 [](const Split& op) -> Operation {
                   return Concat{op.dim, op.sizes, op.num_parts};
                 },
                 [](const ConcatGrouped& op) -> Operation {
                   return SplitGrouped{op.dim, op.groups, op.sizes, op.num_parts};
                 },
                 [](const SplitGrouped& op) -> Operation {
                   return ConcatGrouped{op.dim, op.groups, op.sizes, op.num_parts};
                 },
                 [](const Stack& op) -> Operation {
                   return Unstack{op.capture, op.dim};
                 },
                 [](const Unstack& op) -> Operation {
                   return Stack{op.capture, op.dim};
                 },
                 [](const Reshape& op) -> Operation {
                   return Reshape{op.to, op.from};
                 },
                 [](const Unflatten& op) -> Operation {
                   return Flatten{op.dim, op.sizes};
                 },
                 [](const Flatten& op) -> Operation {
                   return Unflatten{op.dim, op.sizes};
                 },
                 [](const Permute& op) -> Operation {
                   const auto order = checked_order(op.order, op.order.size());
                   Permute back{std::vector<std::int64_t>(order.size())};
                   for (std::size_t d = 0; d < order.size(); ++d) {
                     back.order[order[d]] = static_cast<std::int64_t>(d);
                   }
                   return back;
                 },
                 [](const Transpose& op) -> Operation { return op; },
                 [](const Slice&) -> Operation {
                   throw ShapeProblem("an operation that can be undone (for a padding: unpad)",
                                      "a slice, which drops elements");
                 },
                 [](const Pad& op) -> Operation {
                   return Unpad{op.dim, op.from, op.to, op.filling};
                 },
                 [](const Unpad& op) -> Operation {
                   return Pad{op.dim, op.from, op.to, op.filling};
                 },
                 [](const Duplicate& op) -> Operation { return MergeEqual{op.num_parts}; },
                 [](const MergeEqual& op) -> Operation { return Duplicate{op.num_parts}; },
                 [](const Add& op) -> Operation { return Add{-op.value}; }},
      operation);
}

void apply(const Operation& operation, Subject subject, std::vector<Stream>& streams,
           Applied& applied) {
  using Parts = std::vector<BlockTensor>;
  const auto map = [&](auto function) { map_tensors(streams, function); };
  const auto join = [&](auto function) { join_streams(streams, function); };
  const auto fork = [&](std::size_t n, auto function) { fork_stream(streams, n, function); };
  std::visit(
      Overloaded{
          [&](const Concat& op) { join([&](Parts p) { return concat_one(std::move(p), op); }); },
          [&](const Split& op) {
            fork(op.num_parts, [&](const BlockTensor& t) { return split_one(t, op); });
          },
          [&](const ConcatGrouped& op) {
            join([&](Parts p) { return concat_groups(std::move(p), op); });
          },
          [&](const SplitGrouped& op) {
            fork(op.num_parts, [&](BlockTensor t) { return split_groups(std::move(t), op); });
          },
          [&](const Stack& op) {
            for (Stream& stream : streams) stream = stacked(std::move(stream), op);
          },
          [&](const Unstack& op) {
            for (Stream& stream : streams) stream = unstacked(std::move(stream), op);
          },
          [&](const Reshape& op) {
            map([&](BlockTensor t) { return reshape_whole(std::move(t), op); });
          },
          [&](const Unflatten& op) {
            map([&](BlockTensor t) { return unflatten_dim(std::move(t), op.dim, op.sizes); });
          },
          [&](const Flatten& op) {
            map([&](BlockTensor t) { return flatten_dims(std::move(t), op.dim, op.sizes); });
          },
          [&](const Permute& op) {
            map([&](BlockTensor t) {
              const auto order = checked_order(op.order, t.shape.size());
              return permute(std::move(t), order);
            });
          },
          [&](const Transpose& op) {
            map([&](BlockTensor t) { return transposed(std::move(t), op); });
          },
          [&](const Slice& op) {
            map([&](const BlockTensor& t) { return sliced(t, op, applied); });
          },
          [&](const Pad& op) {
            map([&](BlockTensor t) { return padded(std::move(t), op, subject); });
          },
          [&](const Unpad& op) {
            map([&](const BlockTensor& t) { return unpadded(t, op, subject, applied); });
          },
          [&](const Duplicate& op) {
            fork(op.num_parts, [&](const BlockTensor& t) { return Parts(op.num_parts, t); });
          },
          [&](const MergeEqual&) {
            join([&](Parts p) { return merge_equal(std::move(p), applied); });
          },
          [&](const Add& op) {
            map([&](BlockTensor t) { return added_to(std::move(t), op, subject); });
          }},
      operation);
}

}  // namespace tessera::recipe
