#include "tessera/runtime/embedding/embedding_bag_collection.h"

#include <torch/nn/functional/embedding.h>
#include <torch/types.h>

#include "runtime/embedding/initial_weight.h"
#include "runtime/embedding/table_batch.h"
#include "runtime/embedding/table_device.h"
#include "tessera/base/error.h"

namespace tessera {

EmbeddingBagCollectionBase::EmbeddingBagCollectionBase(TableSet tables)
    : tables_(std::move(tables)),
      embedding_bags_(register_module("embedding_bags",
                                      std::make_shared<torch::nn::Module>("EmbeddingBags"))) {}

void EmbeddingBagCollectionBase::register_weight(const std::string& table, at::Tensor weight) {
  embedding_bags_->register_module(table, std::make_shared<torch::nn::Module>("EmbeddingBag"))
      ->register_parameter("weight", weight, weight.requires_grad());
}

at::Tensor EmbeddingBagCollectionBase::weight(const std::string& table) const {
  const auto modules = embedding_bags_->named_children();
  const auto* const module = modules.find(table);
  if (module == nullptr) {
    throw Error::expected(ErrorKind::not_found, {}, "embedding table", "a table of the collection",
                          "'" + table + "'");
  }
  return (*module)->named_parameters(/*recurse=*/false)["weight"];
}

EmbeddingBagCollection::EmbeddingBagCollection(std::vector<EmbeddingBagConfig> tables,
                                               const EmbeddingBagCollectionOptions& options)
    : EmbeddingBagCollectionBase(TableSet(std::move(tables), options)) {
  for (const EmbeddingBagConfig& config : this->tables().configs()) {
    const auto numel = static_cast<std::uint64_t>(config.num_embeddings * config.embedding_dim);
    const std::uint64_t nbytes = numel * c10::elementSize(config.dtype);
    at::Tensor weight;
    embedding::allocate_on(options.device, {config.name, "a table", nbytes}, [&] {
      weight = torch::empty({config.num_embeddings, config.embedding_dim},
                            at::TensorOptions(config.dtype).device(options.device));
    });
    if (options.device.is_cpu()) {
      embedding::initialize(config, weight);
    } else if (!weight.is_meta()) {  // made on the CPU, so that all devices get the same values
      at::Tensor values = torch::empty(weight.sizes(), config.dtype);
      embedding::initialize(config, values);
      weight.copy_(values);
    }
    register_weight(config.name, weight.requires_grad_());
  }
}

namespace {

/// Returns for each bag the sum of its rows of one table, in float32.
at::Tensor pooled_sums(const at::Tensor& weight, const at::Tensor& ids, const at::Tensor& offsets,
                       const at::Tensor& sample_weights) {
  if (ids.numel() == 0) {
    // Without ids, all sums are zero. For autograd, the zeros must still depend on the weight.
    return torch::zeros({offsets.numel() - 1, weight.size(1)},
                        weight.options().dtype(at::kFloat).requires_grad(false)) +
           weight.narrow(0, 0, 0).sum();
  }
  namespace F = torch::nn::functional;
  return F::embedding_bag(ids, weight.to(at::kFloat),
                          F::EmbeddingBagFuncOptions()
                              .offsets(offsets)
                              .mode(torch::kSum)
                              .include_last_offset(true)
                              .per_sample_weights(sample_weights));
}

}  // namespace

KeyedTensor EmbeddingBagCollection::forward(const KeyedJaggedTensor& batch) {
  const at::Device device = tables().configs().empty()
                                ? at::Device(at::kCPU)
                                : weight(tables().configs().front().name).device();
  const embedding::TableBatch slices = embedding::batch_for(tables(), batch, device);
  const auto long_options = at::TensorOptions(device).dtype(at::kLong);
  const auto float_options = long_options.dtype(at::kFloat);
  const at::Tensor ids = slices.ids.to(device);
  const at::Tensor sample_weights =
      batch.has_weights() ? batch.weights().to(float_options) : at::Tensor();
  std::vector<at::Tensor> columns;
  for (std::size_t i = 0; i < tables().outputs().size(); ++i) {
    const EmbeddingBagConfig& config = tables().configs()[tables().outputs()[i].table];
    const embedding::TableBatch::Slice& slice = slices.slices[i];
    at::Tensor lengths = torch::zeros({slices.batch_size}, long_options);
    if (!slice.is_missing) {
      lengths = slices.lengths.narrow(0, slice.first_bag, slices.batch_size).to(device);
    }
    const at::Tensor offsets = torch::cat({torch::zeros({1}, long_options), lengths.cumsum(0)});
    const auto cut = [&](const at::Tensor& tensor) {
      return tensor.narrow(0, slice.begin, slice.end - slice.begin);
    };
    at::Tensor pooled = pooled_sums(weight(config.name), cut(ids), offsets,
                                    sample_weights.defined() ? cut(sample_weights) : at::Tensor());
    if (config.pooling == Pooling::mean) {
      pooled = pooled / lengths.clamp_min(1).to(at::kFloat).unsqueeze(1);
    }
    columns.push_back(std::move(pooled));
  }
  return tables().named(columns.empty() ? torch::zeros({slices.batch_size, 0}, float_options)
                                        : torch::cat(columns, 1));
}

}  // namespace tessera
