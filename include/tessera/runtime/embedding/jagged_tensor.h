#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// Bags of ids. A bag has the ids (row numbers of a table) of one sample; bags may differ in
/// length. What torchrec calls JaggedTensor. Immutable. Copies share memory. `values` and `weights`
/// of the caller are shared too if they are contiguous, so do not write to them.
///
/// Shapes, for B bags with N ids in total: `values` `[N]`, int32 or int64; `lengths` `[B]` and
/// `offsets` `[B + 1]`, int64; `weights` `[N]`, floating point, or undefined. Bag b is
/// `values[offsets[b]:offsets[b + 1]]`. All are contiguous. Put `weights` on the values' device.
class JaggedTensor {
 public:
  /// Builds a JaggedTensor from the number of ids in each bag, int32 or int64. Throws:
  /// Error(invalid_argument) naming the problem: negative lengths, lengths whose sum is not N,
  /// offsets that decrease or do not go from 0 to N, wrong shapes or dtypes.
  static JaggedTensor from_lengths(at::Tensor values, at::Tensor lengths, at::Tensor weights = {});
  /// Builds a JaggedTensor from `offsets` `[B + 1]`, which go from 0 to N. Throws as from_lengths.
  static JaggedTensor from_offsets(at::Tensor values, at::Tensor offsets, at::Tensor weights = {});

  const at::Tensor& values() const { return values_; }
  const at::Tensor& lengths() const { return lengths_; }
  const at::Tensor& offsets() const { return offsets_; }
  const at::Tensor& weights() const { return weights_; }
  bool has_weights() const { return weights_.defined(); }
  std::int64_t num_bags() const { return lengths_.numel(); }
  /// Returns one 1-d tensor of ids for each bag. These are views of `values`.
  std::vector<at::Tensor> to_dense() const;

 private:
  friend class KeyedJaggedTensor;
  JaggedTensor(at::Tensor values, at::Tensor lengths, at::Tensor offsets, at::Tensor weights,
               at::Tensor host_offsets);

  at::Tensor values_, lengths_, offsets_, weights_;
  at::Tensor host_offsets_;  // the numbers in `offsets_`, on the CPU
};

/// Bags of ids for several features, in one tensor. Each feature (key) has one bag for each sample.
/// What torchrec calls KeyedJaggedTensor. Immutable; shares memory as JaggedTensor does.
///
/// Layout, for F keys and B samples: feature-major. Bag `f * B + b` is the bag of key f and sample
/// b. Shapes are those of a JaggedTensor with F * B bags.
class KeyedJaggedTensor {
 public:
  /// Builds a KeyedJaggedTensor from the number of ids in each bag. Does not check the ids, because
  /// their range depends on the table. Throws: Error(invalid_argument) naming key, sample and
  /// problem: duplicate keys, a number of bags that is no multiple of F, and everything that
  /// JaggedTensor::from_lengths refuses.
  static KeyedJaggedTensor from_lengths(std::vector<std::string> keys, at::Tensor values,
                                        at::Tensor lengths, at::Tensor weights = {});
  /// Takes `offsets` `[F * B + 1]`, from 0 to N, instead of lengths. Throws as from_lengths.
  static KeyedJaggedTensor from_offsets(std::vector<std::string> keys, at::Tensor values,
                                        at::Tensor offsets, at::Tensor weights = {});
  /// Keys, each with its bags.
  using Entries = std::vector<std::pair<std::string, JaggedTensor>>;
  /// Joins the bags of all entries, in order; copies them. Throws: Error(invalid_argument) if the
  /// numbers of bags differ, a key occurs twice, or only some entries have weights.
  static KeyedJaggedTensor from_dict(const Entries& entries);
  /// Returns `batch_size` samples whose bags are all empty, on the CPU. Without keys, the batch has
  /// no samples, whatever `batch_size` is.
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
  /// Returns the numbers in `offsets()` as a CPU tensor, without waiting for a device.
  const at::Tensor& host_offsets() const { return bags_.host_offsets_; }

  /// Returns the bags of one key: views of this batch, except for new offsets, which begin at 0.
  /// Throws: Error(not_found) if there is no such key.
  JaggedTensor operator[](const std::string& key) const;
  /// Returns the bags of each key, in the order of `keys()`, each as operator[] returns them.
  Entries to_dict() const;
  /// Returns a batch of the first `sizes[0]` keys, one of the next `sizes[1]`, and so on. Shares
  /// memory. Throws: Error(invalid_argument) if the sizes do not add up to the number of keys.
  std::vector<KeyedJaggedTensor> split(std::span<const std::int64_t> sizes) const;
  /// Copies the keys at `positions`, in that order. Throws: Error(invalid_argument) if one repeats.
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

/// A matrix of floats with one row for each sample. Each key names a range of columns. What
/// torchrec calls KeyedTensor.
class KeyedTensor {
 public:
  /// `widths`: columns of each key. `values`: `[B, sum of widths]` for B samples. Throws:
  /// Error(invalid_argument) if `values` has another shape, or if there is not one width per key.
  KeyedTensor(std::vector<std::string> keys, std::vector<std::int64_t> widths, at::Tensor values);

  const std::vector<std::string>& keys() const { return keys_; }
  const std::vector<std::int64_t>& widths() const { return widths_; }
  const at::Tensor& values() const { return values_; }
  /// Returns a key's columns, as a view. Shape: `[B, width]`. Throws: Error(not_found) if there is
  /// no such key.
  at::Tensor operator[](const std::string& key) const;
  /// Returns each key's columns, in the order of `keys()`, as views.
  std::vector<std::pair<std::string, at::Tensor>> to_dict() const;

  /// Returns one new tensor for each group of keys, with the columns of these keys in the group's
  /// order. Takes a key's columns from the first tensor that has the key. Requires: equal B, no
  /// empty group. Throws: Error(not_found) naming a key that no tensor has.
  static std::vector<at::Tensor> regroup(std::span<const KeyedTensor> tensors,
                                         std::span<const std::vector<std::string>> groups);

 private:
  std::vector<std::string> keys_;
  std::vector<std::int64_t> widths_;
  at::Tensor values_;
};

}  // namespace tessera
