#include "runtime/embedding/device_packing.h"

#include <torch/types.h>

namespace tessera::embedding {
namespace {

using at::Tensor;

/// Returns a tensor that begins with the selected elements of `values`, in order. `places` has the
/// index in the result for each element; elements that are not selected have the last index. The
/// result has one element more than `values`. Elements after the selected ones have no meaning.
Tensor selected(const Tensor& values, const Tensor& places) {
  Tensor result = torch::zeros({values.numel() + 1}, values.options());
  result.scatter_(0, places, values);
  return result;
}

}  // namespace

DevicePacking::DevicePacking(const TableBatch& batch, const std::vector<Outgoing>& outgoing)
    : batch_(batch), outgoing_(outgoing) {
  std::vector<Tensor> num_ids;
  for (const Outgoing& each : outgoing) {
    selected_.push_back(select(each));
    num_ids.push_back(selected_.back().num_ids);
  }
  num_ids_ = num_ids.empty() ? torch::empty({0}, batch.ids.options()) : torch::cat(num_ids);
}

DevicePacking::Selected DevicePacking::select(const Outgoing& outgoing) const {
  const TableBatch::Slice& slice = outgoing.slice;
  const std::int64_t num_ids = slice.end - slice.begin;
  const auto options = batch_.ids.options();
  const auto cut = [&](const Tensor& tensor) { return tensor.narrow(0, slice.begin, num_ids); };
  Selected all;
  all.lengths = slice.is_missing ? torch::zeros({batch_.batch_size}, options)
                                 : batch_.lengths.narrow(0, slice.first_bag, batch_.batch_size);
  all.ids = cut(batch_.ids);
  if (batch_.weights.defined()) all.weights = cut(batch_.weights);
  all.positions = torch::arange(slice.begin, slice.end, options);
  all.num_ids = torch::full({1}, num_ids, options);
  if (outgoing.assignment->has_all_rows || num_ids == 0) return all;

  const FlatRange rows = outgoing.assignment->rows;
  const Tensor is_here = all.ids.ge(rows.begin) & all.ids.lt(rows.end);
  const Tensor counts = is_here.to(at::kLong);
  const Tensor places = torch::where(is_here, counts.cumsum(0) - 1, num_ids);
  const Tensor ends = batch_.offsets.narrow(0, slice.first_bag + 1, batch_.batch_size);
  const Tensor samples = at::searchsorted(ends, all.positions, /*out_int32=*/false, /*right=*/true);
  Selected here;
  here.lengths = torch::zeros({batch_.batch_size}, options).index_add_(0, samples, counts);
  here.ids = selected(all.ids - rows.begin, places);
  if (all.weights.defined()) here.weights = selected(all.weights, places);
  here.positions = selected(all.positions, places);
  here.num_ids = counts.sum().view({1});
  return here;
}

Tensor DevicePacking::message(int num_ranks) const {
  std::vector<Tensor> parts;
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::vector<Tensor> lengths, ids, weights;
    std::int64_t num_ids = 0;
    for (std::size_t i = 0; i < outgoing_.size(); ++i) {
      if (outgoing_[i].rank != rank) continue;
      lengths.push_back(selected_[i].lengths);
      ids.push_back(selected_[i].ids.narrow(0, 0, outgoing_[i].num_ids));
      num_ids += outgoing_[i].num_ids;
      if (!selected_[i].weights.defined()) continue;
      weights.push_back(selected_[i].weights.narrow(0, 0, outgoing_[i].num_ids));
    }
    parts.insert(parts.end(), lengths.begin(), lengths.end());
    parts.insert(parts.end(), ids.begin(), ids.end());
    if (weights.empty() || num_ids == 0) continue;
    if (num_ids % 2 != 0) weights.push_back(torch::zeros({1}, weights.front().options()));
    parts.push_back(torch::cat(weights).view(at::kLong));
  }
  return parts.empty() ? torch::empty({0}, batch_.ids.options()) : torch::cat(parts);
}

Tensor DevicePacking::positions() const {
  std::vector<Tensor> parts;
  for (std::size_t i = 0; i < outgoing_.size(); ++i) {
    parts.push_back(selected_[i].positions.narrow(0, 0, outgoing_[i].num_ids));
  }
  return parts.empty() ? torch::empty({0}, batch_.ids.options()) : torch::cat(parts);
}

Tensor has_bad_ids(const TableSet& tables, const TableBatch& batch) {
  Tensor is_bad = torch::zeros({}, batch.ids.options().dtype(at::kBool));
  for (std::size_t i = 0; i < tables.outputs().size(); ++i) {
    const TableBatch::Slice& slice = batch.slices[i];
    if (slice.begin == slice.end) continue;
    const Tensor ids = batch.ids.narrow(0, slice.begin, slice.end - slice.begin);
    const std::int64_t num_rows = tables.configs()[tables.outputs()[i].table].num_embeddings;
    is_bad = is_bad | (ids.lt(0) | ids.ge(num_rows)).any();
  }
  return is_bad;
}

}  // namespace tessera::embedding
