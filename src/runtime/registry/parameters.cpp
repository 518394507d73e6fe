#include "tessera/runtime/registry/parameters.h"

#include <unordered_set>

#include "runtime/registry/parameter_shards.h"
#include "tessera/runtime/registry/fused_updates.h"

namespace tessera {
namespace {

Shape whole_shape(const at::Tensor& parameter) {
  if (const auto shard = registry::find_shard(parameter)) return shard->whole.shape;
  return {parameter.sizes().begin(), parameter.sizes().end()};
}

}  // namespace

torch::OrderedDict<std::string, at::Tensor> named_parameters(const torch::nn::Module& module) {
  torch::OrderedDict<std::string, at::Tensor> named;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& each : module.named_parameters()) {
    if (!each.value().defined()) continue;
    if (!seen.insert(each.value().unsafeGetTensorImpl()).second) continue;
    named.insert(each.key(), each.value());
  }
  return named;
}

std::vector<at::Tensor> parameters(const torch::nn::Module& module) {
  return named_parameters(module).values();
}

std::vector<WholeParameter> whole_parameters(const torch::nn::Module& module) {
  std::vector<WholeParameter> found;
  for (const auto& each : named_parameters(module)) {
    found.push_back({each.key(), whole_shape(each.value()), each.value()});
  }
  return found;
}

std::vector<WholeParameter> detail::parameters_to_group(const torch::nn::Module& module) {
  std::unordered_set<const at::TensorImpl*> fused;
  for (const auto& found : registry::find_fused_updates(module)) {
    for (const auto& each : found.updates->parameters()) {
      fused.insert(each.tensor.unsafeGetTensorImpl());
    }
  }
  std::vector<WholeParameter> found = whole_parameters(module);
  std::erase_if(found, [&](const WholeParameter& parameter) {
    return fused.contains(parameter.tensor.unsafeGetTensorImpl());
  });
  return found;
}

}  // namespace tessera
