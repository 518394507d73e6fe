#include "tessera/runtime/embedding/jagged_tensor.h"

#include <torch/types.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "tessera/base/error.h"

namespace tessera {
namespace {

using at::Tensor;

/// Names bags in messages: `bag 3`, or `feature 'a', sample 3` for a KeyedJaggedTensor.
struct BagNames {
  std::span<const std::string> keys;
  std::int64_t batch_size = 0;

  std::string operator()(std::int64_t bag) const {
    if (keys.empty() || batch_size == 0) return "bag " + std::to_string(bag);
    return "feature '" + keys[static_cast<std::size_t>(bag / batch_size)] + "', sample " +
           std::to_string(bag % batch_size);
  }
};

[[noreturn]] void refuse(const std::string& what, const std::string& expected,
                         const std::string& found) {
  throw Error::expected(ErrorKind::invalid_argument, {}, what, expected, found);
}

std::string shape_and_dtype(const Tensor& tensor) {
  if (!tensor.defined()) return "none";
  return std::string(c10::toString(tensor.scalar_type())) + " of shape " + c10::str(tensor.sizes());
}

void check_vector(const Tensor& tensor, const std::string& what) {
  const bool is_index =
      tensor.defined() && (tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt);
  if (!is_index || tensor.dim() != 1) {
    refuse(what, "a one-dimensional int32 or int64 tensor", shape_and_dtype(tensor));
  }
}

/// Returns an int64 copy of lengths or offsets, so that the caller cannot change them after the
/// checks.
Tensor own_copy(const Tensor& vector, at::Device device) {
  return vector.to(device, at::kLong, /*non_blocking=*/false, /*copy=*/true).contiguous();
}

/// The lengths of bags and the offsets at which they begin, as int64 on the values' device.
struct BagPlaces {
  Tensor lengths;
  Tensor offsets;
  Tensor host_offsets;
};

BagPlaces checked_lengths(const Tensor& values, const Tensor& lengths, const BagNames& name) {
  check_vector(lengths, "lengths");
  const Tensor on_host = own_copy(lengths, at::kCPU);
  const std::int64_t num_bags = on_host.numel();
  Tensor offsets = torch::empty({num_bags + 1}, at::kLong);
  const auto* const length = on_host.const_data_ptr<std::int64_t>();
  auto* const offset = offsets.mutable_data_ptr<std::int64_t>();
  offset[0] = 0;
  for (std::int64_t bag = 0; bag < num_bags; ++bag) {
    if (length[bag] < 0 || length[bag] > values.numel() - offset[bag]) {
      refuse("length of " + name(bag),
             "0 to " + std::to_string(values.numel() - offset[bag]) +
                 ", the number of values that are left",
             std::to_string(length[bag]));
    }
    offset[bag + 1] = offset[bag] + length[bag];
  }
  if (offset[num_bags] != values.numel()) {
    refuse("sum of lengths", std::to_string(values.numel()) + ", the number of values",
           std::to_string(offset[num_bags]));
  }
  return {on_host.to(values.device()), offsets.to(values.device()), offsets};
}

BagPlaces checked_offsets(const Tensor& values, const Tensor& offsets, const BagNames& name) {
  check_vector(offsets, "offsets");
  if (offsets.numel() == 0) refuse("offsets", "at least 1 (the number of bags + 1)", "none");
  const Tensor on_host = own_copy(offsets, at::kCPU);
  const auto* const offset = on_host.const_data_ptr<std::int64_t>();
  if (offset[0] != 0) refuse("first offset", "0", std::to_string(offset[0]));
  const std::int64_t num_bags = on_host.numel() - 1;
  for (std::int64_t bag = 0; bag < num_bags; ++bag) {
    if (offset[bag + 1] < offset[bag]) {
      refuse("offsets of " + name(bag), "an offset of at least " + std::to_string(offset[bag]),
             std::to_string(offset[bag + 1]));
    }
  }
  if (offset[num_bags] != values.numel()) {
    refuse("last offset", std::to_string(values.numel()) + ", the number of values",
           std::to_string(offset[num_bags]));
  }
  const Tensor lengths = on_host.narrow(0, 1, num_bags) - on_host.narrow(0, 0, num_bags);
  return {lengths.to(values.device()), on_host.to(values.device()), on_host};
}

Tensor checked_weights(const Tensor& values, Tensor weights) {
  if (!weights.defined()) return weights;
  if (!weights.is_floating_point() || weights.dim() != 1 || weights.numel() != values.numel()) {
    refuse("weights",
           "a floating-point tensor of shape [" + std::to_string(values.numel()) +
               "], like the values",
           shape_and_dtype(weights));
  }
  return weights.contiguous();
}

}  // namespace

// --- JaggedTensor

JaggedTensor::JaggedTensor(Tensor values, Tensor lengths, Tensor offsets, Tensor weights,
                           Tensor host_offsets)
    : values_(std::move(values)),
      lengths_(std::move(lengths)),
      offsets_(std::move(offsets)),
      weights_(std::move(weights)),
      host_offsets_(std::move(host_offsets)) {}

JaggedTensor JaggedTensor::from_lengths(Tensor values, Tensor lengths, Tensor weights) {
  check_vector(values, "values");
  BagPlaces places = checked_lengths(values, lengths, {});
  weights = checked_weights(values, std::move(weights));
  return {values.contiguous(), std::move(places.lengths), std::move(places.offsets),
          std::move(weights), std::move(places.host_offsets)};
}

JaggedTensor JaggedTensor::from_offsets(Tensor values, Tensor offsets, Tensor weights) {
  check_vector(values, "values");
  BagPlaces places = checked_offsets(values, offsets, {});
  weights = checked_weights(values, std::move(weights));
  return {values.contiguous(), std::move(places.lengths), std::move(places.offsets),
          std::move(weights), std::move(places.host_offsets)};
}

std::vector<Tensor> JaggedTensor::to_dense() const {
  const Tensor lengths = host_offsets_.diff();
  return values_.split_with_sizes(
      {lengths.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(lengths.numel())});
}

// --- KeyedJaggedTensor

namespace {

/// Returns the number of samples. Throws if a key occurs twice, or if the bags cannot be divided
/// evenly among the keys.
std::int64_t checked_batch_size(const std::vector<std::string>& keys, std::int64_t num_bags) {
  if (std::set<std::string>(keys.begin(), keys.end()).size() != keys.size()) {
    std::set<std::string> seen;
    const auto twice = std::ranges::find_if(
        keys, [&](const std::string& key) { return !seen.insert(key).second; });
    refuse("keys", "each key once", "'" + *twice + "' twice");
  }
  const auto num_keys = static_cast<std::int64_t>(keys.size());
  if (num_keys == 0 ? num_bags != 0 : num_bags % num_keys != 0) {
    refuse("number of bags", "a multiple of the " + std::to_string(num_keys) + " keys",
           std::to_string(num_bags));
  }
  return num_keys == 0 ? 0 : num_bags / num_keys;
}

}  // namespace

KeyedJaggedTensor::KeyedJaggedTensor(std::vector<std::string> keys, std::int64_t batch_size,
                                     JaggedTensor bags)
    : keys_(std::move(keys)), batch_size_(batch_size), bags_(std::move(bags)) {}

KeyedJaggedTensor KeyedJaggedTensor::from_lengths(std::vector<std::string> keys, Tensor values,
                                                  Tensor lengths, Tensor weights) {
  check_vector(values, "values");
  check_vector(lengths, "lengths");
  const std::int64_t batch_size = checked_batch_size(keys, lengths.numel());
  BagPlaces places = checked_lengths(values, lengths, {keys, batch_size});
  weights = checked_weights(values, std::move(weights));
  return {std::move(keys),
          batch_size,
          {values.contiguous(), std::move(places.lengths), std::move(places.offsets),
           std::move(weights), std::move(places.host_offsets)}};
}

KeyedJaggedTensor KeyedJaggedTensor::from_offsets(std::vector<std::string> keys, Tensor values,
                                                  Tensor offsets, Tensor weights) {
  check_vector(values, "values");
  check_vector(offsets, "offsets");
  const std::int64_t batch_size =
      checked_batch_size(keys, std::max<std::int64_t>(offsets.numel() - 1, 0));
  BagPlaces places = checked_offsets(values, offsets, {keys, batch_size});
  weights = checked_weights(values, std::move(weights));
  return {std::move(keys),
          batch_size,
          {values.contiguous(), std::move(places.lengths), std::move(places.offsets),
           std::move(weights), std::move(places.host_offsets)}};
}

KeyedJaggedTensor KeyedJaggedTensor::from_dict(const Entries& entries) {
  if (entries.empty()) return empty();
  std::vector<std::string> keys;
  std::vector<Tensor> values, lengths, weights;
  const auto& [first_key, first] = entries.front();
  for (const auto& [key, bags] : entries) {
    if (bags.num_bags() != first.num_bags()) {
      refuse("batch of feature '" + key + "'",
             std::to_string(first.num_bags()) + " samples, like feature '" + first_key + "'",
             std::to_string(bags.num_bags()));
    }
    if (bags.has_weights() != first.has_weights()) {
      refuse("weights of feature '" + key + "'",
             std::string(first.has_weights() ? "weights" : "no weights") + ", like feature '" +
                 first_key + "'",
             bags.has_weights() ? "weights" : "no weights");
    }
    keys.push_back(key);
    values.push_back(bags.values());
    lengths.push_back(bags.lengths());
    if (bags.has_weights()) weights.push_back(bags.weights());
  }
  return from_lengths(std::move(keys), torch::cat(values), torch::cat(lengths),
                      weights.empty() ? Tensor() : torch::cat(weights));
}

KeyedJaggedTensor KeyedJaggedTensor::empty(std::vector<std::string> keys, std::int64_t batch_size) {
  const auto num_bags = static_cast<std::int64_t>(keys.size()) * batch_size;
  return from_lengths(std::move(keys), torch::empty({0}, at::kLong),
                      torch::zeros({num_bags}, at::kLong));
}

KeyedJaggedTensor KeyedJaggedTensor::concat(std::span<const KeyedJaggedTensor> batches) {
  Entries entries;
  for (const KeyedJaggedTensor& batch : batches) {
    for (auto& entry : batch.to_dict()) entries.push_back(std::move(entry));
  }
  return from_dict(entries);
}

std::size_t KeyedJaggedTensor::position_of(const std::string& key) const {
  const auto it = std::ranges::find(keys_, key);
  if (it == keys_.end()) {
    throw Error::expected(ErrorKind::not_found, {}, "key of a KeyedJaggedTensor",
                          c10::str("one of ", keys_), "'" + key + "'");
  }
  return static_cast<std::size_t>(it - keys_.begin());
}

JaggedTensor KeyedJaggedTensor::bags_of(std::size_t begin, std::size_t end) const {
  const std::int64_t first = static_cast<std::int64_t>(begin) * batch_size_;
  const std::int64_t num_bags = static_cast<std::int64_t>(end - begin) * batch_size_;
  const Tensor host_offsets = bags_.host_offsets_.narrow(0, first, num_bags + 1);
  const auto* const places = host_offsets.const_data_ptr<std::int64_t>();
  const std::int64_t begin_value = places[0];
  const std::int64_t num_values = places[num_bags] - begin_value;
  return {bags_.values_.narrow(0, begin_value, num_values),
          bags_.lengths_.narrow(0, first, num_bags),
          bags_.offsets_.narrow(0, first, num_bags + 1) - begin_value,
          has_weights() ? bags_.weights_.narrow(0, begin_value, num_values) : Tensor(),
          host_offsets - begin_value};
}

JaggedTensor KeyedJaggedTensor::operator[](const std::string& key) const {
  const std::size_t position = position_of(key);
  return bags_of(position, position + 1);
}

KeyedJaggedTensor::Entries KeyedJaggedTensor::to_dict() const {
  Entries entries;
  for (std::size_t i = 0; i < keys_.size(); ++i) entries.emplace_back(keys_[i], bags_of(i, i + 1));
  return entries;
}

std::vector<KeyedJaggedTensor> KeyedJaggedTensor::split(std::span<const std::int64_t> sizes) const {
  std::vector<KeyedJaggedTensor> splits;
  std::size_t begin = 0;
  for (const std::int64_t size : sizes) {
    if (size < 0 || static_cast<std::size_t>(size) > keys_.size() - begin) {
      refuse("sizes to split by",
             "a sum of " + std::to_string(keys_.size()) + ", the number of keys",
             c10::str(std::vector<std::int64_t>(sizes.begin(), sizes.end())));
    }
    const std::size_t end = begin + static_cast<std::size_t>(size);
    splits.push_back({{keys_.begin() + static_cast<std::ptrdiff_t>(begin),
                       keys_.begin() + static_cast<std::ptrdiff_t>(end)},
                      batch_size_,
                      bags_of(begin, end)});
    begin = end;
  }
  if (begin != keys_.size()) {
    refuse("sizes to split by", "a sum of " + std::to_string(keys_.size()) + ", the number of keys",
           std::to_string(begin));
  }
  return splits;
}

KeyedJaggedTensor KeyedJaggedTensor::permute(std::span<const std::int64_t> positions) const {
  Entries entries;
  for (const std::int64_t position : positions) {
    if (position < 0 || static_cast<std::size_t>(position) >= keys_.size()) {
      refuse("position of a key", "at least 0 and below " + std::to_string(keys_.size()),
             std::to_string(position));
    }
    const auto at = static_cast<std::size_t>(position);
    entries.emplace_back(keys_[at], bags_of(at, at + 1));
  }
  return from_dict(entries);
}

KeyedJaggedTensor KeyedJaggedTensor::to(at::Device device) const {
  return {keys_,
          batch_size_,
          {bags_.values_.to(device), bags_.lengths_.to(device), bags_.offsets_.to(device),
           has_weights() ? bags_.weights_.to(device) : Tensor(), bags_.host_offsets_}};
}

// --- KeyedTensor

KeyedTensor::KeyedTensor(std::vector<std::string> keys, std::vector<std::int64_t> widths,
                         Tensor values)
    : keys_(std::move(keys)), widths_(std::move(widths)), values_(std::move(values)) {
  const std::int64_t width = std::accumulate(widths_.begin(), widths_.end(), std::int64_t{0});
  const bool are_widths = std::ranges::none_of(widths_, [](std::int64_t each) { return each < 0; });
  if (keys_.size() != widths_.size() || !are_widths || values_.dim() != 2 ||
      values_.size(1) != width) {
    refuse("values of a KeyedTensor",
           "shape [B, " + std::to_string(width) + "] of " + std::to_string(keys_.size()) + " keys",
           shape_and_dtype(values_) + " with " + std::to_string(widths_.size()) + " widths");
  }
}

Tensor KeyedTensor::operator[](const std::string& key) const {
  std::int64_t column = 0;
  for (std::size_t i = 0; i < keys_.size(); ++i) {
    if (keys_[i] == key) return values_.narrow(1, column, widths_[i]);
    column += widths_[i];
  }
  throw Error::expected(ErrorKind::not_found, {}, "key of a KeyedTensor",
                        c10::str("one of ", keys_), "'" + key + "'");
}

std::vector<std::pair<std::string, Tensor>> KeyedTensor::to_dict() const {
  std::vector<std::pair<std::string, Tensor>> dict;
  for (const std::string& key : keys_) dict.emplace_back(key, (*this)[key]);
  return dict;
}

std::vector<Tensor> KeyedTensor::regroup(std::span<const KeyedTensor> tensors,
                                         std::span<const std::vector<std::string>> groups) {
  std::vector<Tensor> regrouped;
  for (const std::vector<std::string>& group : groups) {
    std::vector<Tensor> columns;
    for (const std::string& key : group) {
      const auto has_key = [&](const KeyedTensor& each) {
        return std::ranges::find(each.keys(), key) != each.keys().end();
      };
      const auto found = std::ranges::find_if(tensors, has_key);
      if (found == tensors.end()) {
        throw Error::expected(ErrorKind::not_found, {}, "key to regroup",
                              "a key of one of the KeyedTensors", "'" + key + "'");
      }
      columns.push_back((*found)[key]);
    }
    regrouped.push_back(torch::cat(columns, 1));
  }
  return regrouped;
}

}  // namespace tessera
