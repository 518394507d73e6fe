#include "runtime/embedding/table_batch.h"

#include <torch/types.h>

#include <algorithm>
#include <unordered_map>

#include "tessera/base/error.h"

namespace tessera::embedding {
namespace {

/// Throws for the first id that is out of range.
void check_ids(const TableSet& tables, const TableSet::Output& output, const TableBatch& batch,
               const TableBatch::Slice& slice) {
  const auto* const ids = batch.ids.const_data_ptr<std::int64_t>();
  const auto& config = tables.configs()[output.table];
  const auto num_rows = static_cast<std::uint64_t>(config.num_embeddings);
  bool is_sound = true;  // combines all checks, so that the loop has no branch
  for (std::int64_t i = slice.begin; i < slice.end; ++i) {
    is_sound &= static_cast<std::uint64_t>(ids[i]) < num_rows;
  }
  if (is_sound) return;
  std::int64_t position = slice.begin;
  for (std::int64_t sample = 0; sample < batch.batch_size; ++sample) {
    const std::int64_t end = position + batch.length(slice, sample);
    for (std::int64_t first = position; position < end; ++position) {
      if (static_cast<std::uint64_t>(ids[position]) < num_rows) continue;
      throw Error::expected(ErrorKind::invalid_argument, {.fqn = config.name},
                            "feature '" + output.feature + "', sample " + std::to_string(sample) +
                                ", position " + std::to_string(position - first),
                            "a row of the table, 0 to " + std::to_string(config.num_embeddings - 1),
                            "id " + std::to_string(ids[position]));
    }
  }
}

}  // namespace

TableBatch batch_for(const TableSet& tables, const KeyedJaggedTensor& keyed, at::Device device) {
  using MissingFeature = EmbeddingBagCollectionOptions::MissingFeature;
  const at::Device of_values = keyed.values().device();
  if (!of_values.is_cpu() && of_values != device) {
    throw Error::expected(
        ErrorKind::invalid_argument, {}, "batch of an embedding collection",
        device.is_cpu() ? "tensors on the CPU" : "tensors on the CPU or on " + device.str(),
        "values on " + of_values.str());
  }
  if (keyed.has_weights() && keyed.weights().device() != of_values) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "weights of a batch",
                          "a tensor on " + of_values.str() + ", like the values",
                          "a tensor on " + keyed.weights().device().str());
  }
  if (tables.options().is_weighted != keyed.has_weights() && keyed.values().numel() > 0) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "weights of a batch",
                          tables.options().is_weighted
                              ? "weights, because the collection is weighted"
                              : "no weights, because the collection is not weighted",
                          keyed.has_weights() ? "weights" : "no weights");
  }
  TableBatch batch;
  batch.batch_size = keyed.batch_size();
  batch.ids = keyed.values().to(at::kLong);
  batch.lengths = keyed.lengths();
  batch.offsets = keyed.offsets();
  if (keyed.has_weights()) batch.weights = keyed.weights().detach().to(at::kFloat);
  std::unordered_map<std::string, std::int64_t> position_of;
  for (const std::string& key : keyed.keys()) {
    position_of.emplace(key, static_cast<std::int64_t>(position_of.size()));
  }
  const auto* const offsets = keyed.host_offsets().const_data_ptr<std::int64_t>();
  for (const TableSet::Output& output : tables.outputs()) {
    const auto found = position_of.find(output.feature);
    if (found == position_of.end()) {
      if (tables.options().missing_feature == MissingFeature::refuse) {
        throw Error::expected(ErrorKind::invalid_argument,
                              {.fqn = tables.configs()[output.table].name}, "feature of the table",
                              "'" + output.feature + "' in the batch",
                              c10::str("keys ", keyed.keys()));
      }
      batch.slices.push_back({.is_missing = true});
      continue;
    }
    const std::int64_t first_bag = found->second * batch.batch_size;
    TableBatch::Slice slice{offsets[first_bag], offsets[first_bag + batch.batch_size], first_bag};
    if (batch.is_on_host()) check_ids(tables, output, batch, slice);
    batch.slices.push_back(slice);
  }
  return batch;
}

namespace {

void divide_means_on_device(const TableSet& tables, const TableBatch& batch,
                            const at::Tensor& lengths, const at::Tensor& pooled) {
  for (std::size_t i = 0; i < tables.outputs().size(); ++i) {
    const TableSet::Output& output = tables.outputs()[i];
    const TableBatch::Slice& slice = batch.slices[i];
    if (tables.configs()[output.table].pooling != Pooling::mean || slice.is_missing) continue;
    const at::Tensor divisor =
        lengths.narrow(0, slice.first_bag, batch.batch_size).clamp_min(1).to(at::kFloat);
    pooled.narrow(1, output.column, tables.output_widths()[i]).div_(divisor.unsqueeze(1));
  }
}

}  // namespace

void divide_means(const TableSet& tables, const TableBatch& batch, const at::Tensor& lengths,
                  at::Tensor pooled) {
  if (!pooled.is_cpu()) return divide_means_on_device(tables, batch, lengths, pooled);
  auto* const data = pooled.mutable_data_ptr<float>();
  for (std::size_t i = 0; i < tables.outputs().size(); ++i) {
    const TableSet::Output& output = tables.outputs()[i];
    const TableBatch::Slice& slice = batch.slices[i];
    if (tables.configs()[output.table].pooling != Pooling::mean || slice.is_missing) continue;
    for (std::int64_t sample = 0; sample < batch.batch_size; ++sample) {
      const std::int64_t length = batch.length(slice, sample);
      if (length < 2) continue;
      float* const row = data + sample * tables.output_width() + output.column;
      const auto divisor = static_cast<float>(length);
      for (std::int64_t k = 0; k < tables.output_widths()[i]; ++k) row[k] /= divisor;
    }
  }
}

}  // namespace tessera::embedding
