#include "runtime/embedding/device_packing.h"
#include "runtime/torch_bridge.h"

#include <torch/types.h>

#include <algorithm>
#include <map>

namespace tessera::embedding {
namespace {

using at::Tensor;

/// The ids of one feature, which follow each other in a batch.
struct Run {
  std::int64_t end;
  std::int64_t num_rows;  // of the smallest table in which they are looked up
};

Tensor positions_of(const TableBatch::Slice& slice, const at::TensorOptions& options) {
  return torch::arange(slice.begin, slice.end, options);
}

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
  for (const Outgoing& each : outgoing) selected_.push_back(select(each));
  const auto is_counted = [](const Selected& each) { return each.num_ids.defined(); };
  if (std::ranges::none_of(selected_, is_counted)) return;
  std::vector<Tensor> num_ids;
  for (std::size_t i = 0; i < outgoing.size(); ++i) {
    const TableBatch::Slice& slice = outgoing[i].slice;
    num_ids.push_back(is_counted(selected_[i])
                          ? selected_[i].num_ids
                          : torch::full({1}, slice.end - slice.begin, batch.ids.options()));
  }
  num_ids_ = torch::cat(num_ids);
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
  if (outgoing.assignment->has_all_rows || num_ids == 0) return all;

  const FlatRange rows = outgoing.assignment->rows;
  const Tensor is_here = all.ids.ge(rows.begin) & all.ids.lt(rows.end);
  const Tensor counts = is_here.to(at::kLong);
  const Tensor places = torch::where(is_here, counts.cumsum(0) - 1, num_ids);
  const Tensor ends = batch_.offsets.narrow(0, slice.first_bag + 1, batch_.batch_size);
  const Tensor positions = positions_of(slice, options);
  const Tensor samples = at::searchsorted(ends, positions, /*out_int32=*/false, /*right=*/true);
  Selected here;
  here.lengths = torch::zeros({batch_.batch_size}, options).index_add_(0, samples, counts);
  here.ids = selected(all.ids - rows.begin, places);
  if (all.weights.defined()) here.weights = selected(all.weights, places);
  here.positions = selected(positions, places);
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
    const Tensor& positions = selected_[i].positions;
    parts.push_back(positions.defined() ? positions.narrow(0, 0, outgoing_[i].num_ids)
                                        : positions_of(outgoing_[i].slice, batch_.ids.options()));
  }
  return parts.empty() ? torch::empty({0}, batch_.ids.options()) : torch::cat(parts);
}

Tensor has_bad_ids(const TableSet& tables, const TableBatch& batch) {
  std::map<std::int64_t, Run> runs;  // by their begin
  for (std::size_t i = 0; i < tables.outputs().size(); ++i) {
    const TableBatch::Slice& slice = batch.slices[i];
    if (slice.begin == slice.end) continue;
    const std::int64_t num_rows = tables.configs()[tables.outputs()[i].table].num_embeddings;
    const auto [found, is_new] = runs.emplace(slice.begin, Run{slice.end, num_rows});
    if (!is_new) found->second.num_rows = std::min(found->second.num_rows, num_rows);
  }
  const auto options = batch.ids.options();
  if (runs.empty()) return torch::zeros({}, options.dtype(at::kBool));
  std::vector<Tensor> ids;
  const auto num_runs = static_cast<std::int64_t>(runs.size());
  Tensor on_host = pinned({2, num_runs}, at::kLong);
  std::int64_t* end = on_host.mutable_data_ptr<std::int64_t>();  // of each run, within all ids
  std::int64_t* num_rows = end + num_runs;                       // of the run's table
  std::int64_t num_ids = 0;
  for (const auto& [begin, run] : runs) {
    ids.push_back(batch.ids.narrow(0, begin, run.end - begin));
    num_ids += run.end - begin;
    *end++ = num_ids;
    *num_rows++ = run.num_rows;
  }
  const bool is_whole = num_ids == batch.ids.numel();
  const Tensor all = is_whole ? batch.ids : torch::cat(ids);
  const Tensor on_device = on_host.to(options.device(), /*non_blocking=*/true);
  const Tensor run_of_id = at::searchsorted(on_device[0], torch::arange(num_ids, options),
                                            /*out_int32=*/false, /*right=*/true);
  return (all.lt(0) | all.ge(on_device[1].index_select(0, run_of_id))).any();
}

}  // namespace tessera::embedding
