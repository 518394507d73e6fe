#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// Bags of ids, which may have different lengths; one bag per sample. What torchrec calls
/// JaggedTensor.
/// Immutable; copies share memory.
///
/// Shapes, for B bags with N ids in total: `values` `[N]`, int32 or int64; `lengths` `[B]` and
/// `offsets` `[B + 1]`, int64; `weights` `[N]`, floating point, or undefined. Bag b is
/// `values[offsets[b]:offsets[b + 1]]`. All are contiguous. Put `weights` on the values' device.
class JaggedTensor {
 public:
  /// Builds a JaggedTensor from the number of ids in each bag. Throws: Error(invalid_argument)
  /// naming the problem: negative lengths, lengths that do not add up, decreasing offsets, wrong
  /// shapes or dtypes.
  static JaggedTensor from_lengths(at::Tensor values, at::Tensor lengths, at::Tensor weights = {});
  /// Builds a JaggedTensor from `offsets` `[B + 1]`, which go from 0 to N. Throws as from_lengths.
  static JaggedTensor from_offsets(at::Tensor values, at::Tensor offsets, at::Tensor weights = {});

  const at::Tensor& values() const { return values_; }
  const at::Tensor& lengths() const { return lengths_; }
  const at::Tensor& offsets() const { return offsets_; }
  const at::Tensor& weights() const { return weights_; }
  bool has_weights() const { return weights_.defined(); }
  std::int64_t num_bags() const { return lengths_.numel(); }
  /// Returns the ids of each bag, as views.
  std::vector<at::Tensor> to_dense() const;

 private:
  friend class KeyedJaggedTensor;
  JaggedTensor(at::Tensor values, at::Tensor lengths, at::Tensor offsets, at::Tensor weights,
               at::Tensor host_offsets);

  at::Tensor values_, lengths_, offsets_, weights_;
  at::Tensor host_offsets_;  // as `offsets_`, on the CPU
};

/// A batch of bags for several features (keys), in one tensor. What torchrec calls
/// KeyedJaggedTensor. Immutable; copies share memory.
///
/// Layout, for F keys and B samples: feature-major. Bag `f * B + b` is the bag of key f and sample
/// b. Shapes are those of a JaggedTensor with F * B bags.
class KeyedJaggedTensor {
 public:
  /// Builds a KeyedJaggedTensor from the number of ids in each bag. Does not check the ids, because
  /// their range depends on the table. Throws: Error(invalid_argument) naming key, sample and
  /// problem: duplicate keys, negative lengths, lengths that do not add up, decreasing offsets,
  /// wrong shapes or dtypes.
  static KeyedJaggedTensor from_lengths(std::vector<std::string> keys, at::Tensor values,
                                        at::Tensor lengths, at::Tensor weights = {});
  /// Builds a KeyedJaggedTensor from `offsets` `[F * B + 1]`, from 0 to N. Throws as from_lengths.
  static KeyedJaggedTensor from_offsets(std::vector<std::string> keys, at::Tensor values,
                                        at::Tensor offsets, at::Tensor weights = {});
  /// Keys with their bags, in order.
  using Entries = std::vector<std::pair<std::string, JaggedTensor>>;
  /// Joins each key's bags; copies them. Throws: Error(invalid_argument) if numbers of bags differ,
  /// a key occurs twice, or only some entries have weights.
  static KeyedJaggedTensor from_dict(const Entries& entries);
  /// Returns a batch without ids. Without keys, `batch_size` is ignored and the batch has no
  /// samples.
  static KeyedJaggedTensor empty(std::vector<std::string> keys = {}, std::int64_t batch_size = 0);
  /// Joins batches of equal size with different keys, in order; copies them. Throws as from_dict.
  static KeyedJaggedTensor concat(std::span<const KeyedJaggedTensor> batches);

  const std::vector<std::string>& keys() const { return keys_; }
  std::int64_t batch_size() const { return batch_size_; }  // what torchrec calls stride
  const at::Tensor& values() const { return bags_.values_; }
  const at::Tensor& lengths() const { return bags_.lengths_; }
  const at::Tensor& offsets() const { return bags_.offsets_; }
  const at::Tensor& weights() const { return bags_.weights_; }
  bool has_weights() const { return bags_.has_weights(); }
  /// Returns the offsets in host memory, wherever the batch is.
  const at::Tensor& host_offsets() const { return bags_.host_offsets_; }

  /// Returns the bags of one key. All tensors but the offsets are views. Throws: Error(not_found)
  /// if there is no such key.
  JaggedTensor operator[](const std::string& key) const;
  /// Returns the bags of each key, in order of the keys. All tensors but the offsets are views.
  Entries to_dict() const;
  /// Splits by keys: the first `sizes[0]` keys, the next `sizes[1]`, ... Shares memory. Throws:
  /// Error(invalid_argument) if the sizes do not add up to the number of keys.
  std::vector<KeyedJaggedTensor> split(std::span<const std::int64_t> sizes) const;
  /// Returns a copy with the keys at these positions, in this order. Requires: no position twice.
  KeyedJaggedTensor permute(std::span<const std::int64_t> positions) const;
  /// Returns this batch on `device`. Copies only tensors that are on another device.
  KeyedJaggedTensor to(at::Device device) const;

 private:
  KeyedJaggedTensor(std::vector<std::string> keys, std::int64_t batch_size, JaggedTensor bags);
  std::size_t position_of(const std::string& key) const;
  /// Returns the bags of the keys at positions `[begin, end)`.
  JaggedTensor bags_of(std::size_t begin, std::size_t end) const;

  std::vector<std::string> keys_;
  std::int64_t batch_size_;
  JaggedTensor bags_;
};

/// One row of floats per sample. Each key names a range of columns. What torchrec calls
/// KeyedTensor.
class KeyedTensor {
 public:
  /// Shape: `values` is `[B, sum of widths]`, for B samples. Throws: Error(invalid_argument) if
  /// `values` has another shape, or if there is not one width per key.
  KeyedTensor(std::vector<std::string> keys, std::vector<std::int64_t> widths, at::Tensor values);

  const std::vector<std::string>& keys() const { return keys_; }
  const std::vector<std::int64_t>& widths() const { return widths_; }
  const at::Tensor& values() const { return values_; }
  /// Returns a key's columns, as a view. Shape: `[B, width]`. Throws: Error(not_found) if there is
  /// no such key.
  at::Tensor operator[](const std::string& key) const;
  /// Returns each key's columns, in order of the keys, as views.
  std::vector<std::pair<std::string, at::Tensor>> to_dict() const;

  /// Regroups the columns of several tensors: returns one tensor for each group of keys, with
  /// columns in the group's order. Takes a key's columns from the first tensor that has the key.
  /// Throws: Error(not_found) naming a key that no tensor has.
  static std::vector<at::Tensor> regroup(std::span<const KeyedTensor> tensors,
                                         std::span<const std::vector<std::string>> groups);

 private:
  std::vector<std::string> keys_;
  std::vector<std::int64_t> widths_;
  at::Tensor values_;
};

}  // namespace tessera
