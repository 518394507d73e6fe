#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// Bags of ids, one per sample, of different lengths. What torchrec calls JaggedTensor.
/// Immutable; copies share memory.
///
/// Shapes, of B bags with N ids in all: `values` `[N]`, int32 or int64; `lengths` `[B]` and
/// `offsets` `[B + 1]`, int64; `weights` `[N]`, floating point, or undefined. Bag b is
/// `values[offsets[b]:offsets[b + 1]]`. All on one device and contiguous.
class JaggedTensor {
 public:
  /// Throws: Error(invalid_argument) naming what does not fit, and the bag.
  static JaggedTensor from_lengths(at::Tensor values, at::Tensor lengths, at::Tensor weights = {});
  /// The same by where bags begin. Throws: as from_lengths.
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
  JaggedTensor(at::Tensor values, at::Tensor lengths, at::Tensor offsets, at::Tensor weights);

  at::Tensor values_, lengths_, offsets_, weights_;
};

/// A batch of bags for several features (keys), in one piece of memory. What torchrec calls
/// KeyedJaggedTensor. Immutable; copies share memory.
///
/// Layout, of F keys and a batch of B samples: feature-major. Bag `f * B + b` is sample b of key f;
/// shapes are those of a JaggedTensor with F * B bags.
class KeyedJaggedTensor {
 public:
  /// The ids are not looked at here: whether they are in range depends on the table. Throws:
  /// Error(invalid_argument) naming the key, the sample, and what does not fit: keys that occur
  /// twice, lengths below 0 or that do not add up, offsets that go down, other shapes or dtypes.
  static KeyedJaggedTensor from_lengths(std::vector<std::string> keys, at::Tensor values,
                                        at::Tensor lengths, at::Tensor weights = {});
  /// The same by where bags begin. Throws: as from_lengths.
  static KeyedJaggedTensor from_offsets(std::vector<std::string> keys, at::Tensor values,
                                        at::Tensor offsets, at::Tensor weights = {});
  /// Keys with their bags, in order.
  using Entries = std::vector<std::pair<std::string, JaggedTensor>>;
  /// Requires of all entries: equal batches, and weights in all or none.
  static KeyedJaggedTensor from_dict(const Entries& entries);
  /// A batch without ids. Without keys it is one of no samples either.
  static KeyedJaggedTensor empty(std::vector<std::string> keys = {}, std::int64_t batch_size = 0);
  /// Joins batches of equal size and other keys, in order.
  static KeyedJaggedTensor concat(std::span<const KeyedJaggedTensor> parts);

  const std::vector<std::string>& keys() const { return keys_; }
  std::int64_t batch_size() const { return batch_size_; }  // what torchrec calls stride
  const at::Tensor& values() const { return bags_.values_; }
  const at::Tensor& lengths() const { return bags_.lengths_; }
  const at::Tensor& offsets() const { return bags_.offsets_; }
  const at::Tensor& weights() const { return bags_.weights_; }
  bool has_weights() const { return bags_.has_weights(); }

  /// Returns one key's bags, as views but for the offsets. Throws: Error(not_found).
  JaggedTensor operator[](const std::string& key) const;
  /// Returns each key's bags, in order of the keys, as views but for the offsets.
  Entries to_dict() const;
  /// Cuts by keys: the first `sizes[0]` of them, the next `sizes[1]`, ... Requires: the sizes add
  /// up to the number of keys.
  std::vector<KeyedJaggedTensor> split(std::span<const std::int64_t> sizes) const;
  /// Returns the keys at these positions, in this order; some may be left out.
  KeyedJaggedTensor permute(std::span<const std::int64_t> positions) const;
  /// Returns the batch on a device: itself where it is there.
  KeyedJaggedTensor to(at::Device device) const;

 private:
  KeyedJaggedTensor(std::vector<std::string> keys, std::int64_t batch_size, JaggedTensor bags);
  std::size_t position_of(const std::string& key) const;
  /// Cuts out what lies between two keys' positions.
  JaggedTensor bags_of(std::size_t begin, std::size_t end) const;

  std::vector<std::string> keys_;
  std::int64_t batch_size_;
  JaggedTensor bags_;
};

/// One row of floats per sample, in columns that have names. What torchrec calls KeyedTensor.
class KeyedTensor {
 public:
  /// Shape: `values` `[B, sum of widths]`. Throws: Error(invalid_argument).
  KeyedTensor(std::vector<std::string> keys, std::vector<std::int64_t> widths, at::Tensor values);

  const std::vector<std::string>& keys() const { return keys_; }
  const std::vector<std::int64_t>& widths() const { return widths_; }
  const at::Tensor& values() const { return values_; }
  /// Returns a key's columns, as a view. Shape: `[B, width]`. Throws: Error(not_found).
  at::Tensor operator[](const std::string& key) const;
  /// Returns each key's columns, in order of the keys, as views.
  std::vector<std::pair<std::string, at::Tensor>> to_dict() const;

  /// Joins columns of several tensors anew: one tensor for each group of keys, in the group's
  /// order. A key is taken from the first tensor that has it. Throws: Error(not_found).
  static std::vector<at::Tensor> regroup(std::span<const KeyedTensor> tensors,
                                         std::span<const std::vector<std::string>> groups);

 private:
  std::vector<std::string> keys_;
  std::vector<std::int64_t> widths_;
  at::Tensor values_;
};

}  // namespace tessera
