#include "tessera/runtime/fsdp/fully_shard.h"

#include <torch/types.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "runtime/fsdp/flat_param_handle.h"
#include "runtime/fsdp/touch_dispatch.h"
#include "runtime/registry/gradient_hook.h"
#include "runtime/registry/parameter_shards.h"
#include "tessera/base/error.h"
#include "tessera/runtime/registry/registry.h"

namespace tessera {
namespace {

/// The norm over several tensors, computed on their device in double precision.
class Norm {
 public:
  explicit Norm(double type) : type_(type) {}
  void add(const at::Tensor& gradient) {
    if (gradient.numel() == 0) return;
    norms_.push_back(
        at::linalg_vector_norm(gradient, type_, c10::nullopt, /*keepdim=*/false, at::kDouble));
  }
  /// Adds the `power()` of other ranks or of other tensors.
  void add_power(double power) { power_ = is_max() ? max_or_nan(power_, power) : power_ + power; }
  /// Returns the sum of the powers of the elements; for the infinity norm, the largest absolute
  /// value. Waits for the device once.
  double power() const {
    if (norms_.empty()) return power_;
    const double norm = at::linalg_vector_norm(at::stack(norms_), type_).item<double>();
    return is_max() ? max_or_nan(power_, norm) : power_ + std::pow(norm, type_);
  }
  double value() const { return is_max() ? power() : std::pow(power(), 1 / type_); }
  bool is_max() const { return std::isinf(type_); }

 private:
  static double max_or_nan(double a, double b) { return std::isnan(a) || a > b ? a : b; }

  double type_;
  std::vector<at::Tensor> norms_;
  double power_ = 0;
};

/// Throws if a parameter is within unshard_params. Its gradient is then whole or hidden, so a sum
/// of the ranks' norms would be wrong.
void refuse_whole_parameters(const torch::nn::Module& root) {
  for (const auto& each : root.named_parameters()) {
    const auto handle = fsdp::FlatParamHandle::of(each.value());
    if (!handle || !handle->is_whole()) continue;
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = each.key()}, "clip_grad_norm_",
                          "a call outside of unshard_params", "a call within it",
                          "within it gradients are whole or hidden; clip before the scope begins");
  }
}

/// Returns the group of all ranks of the model; nullptr if there is only this rank.
std::shared_ptr<dist::Group> group_of_model(const torch::nn::Module& root) {
  for (const auto& module : root.modules()) {
    const auto mesh = registry::applied_mesh(*module);
    if (mesh && mesh->world_size() > 1) return mesh->world();
  }
  return nullptr;
}

}  // namespace

double clip_grad_norm_(torch::nn::Module& root, double max_norm, double norm_type) {
  if (!(norm_type > 0)) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "norm_type",
                          "a positive number or infinity", std::to_string(norm_type));
  }
  if (!(max_norm >= 0)) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "max_norm", "a number of 0 or more",
                          std::to_string(max_norm));
  }
  refuse_whole_parameters(root);
  const at::NoGradGuard no_grad;
  const fsdp::UntouchedScope untouched;
  // The norms of shards are added over the ranks that share a tensor. A tensor that every rank
  // holds counts once.
  std::vector<std::shared_ptr<dist::Group>> groups;
  std::map<const dist::Group*, Norm> sharded;
  Norm total(norm_type);
  Norm own_copies(norm_type);  // of gradients that nothing keeps equal on all ranks
  bool has_own_copies = false;
  std::vector<at::Tensor> gradients;
  std::set<const c10::TensorImpl*> seen;
  for (const at::Tensor& parameter : root.parameters()) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    const auto shard = registry::find_shard(parameter);
    Norm* norm = &total;
    if (shard && shard->group != nullptr) {
      const auto [it, is_new] = sharded.try_emplace(shard->group.get(), norm_type);
      if (is_new) groups.push_back(shard->group);
      norm = &it->second;
    } else if (!shard && registry::gradient_hook(parameter) == nullptr) {
      norm = &own_copies;
      has_own_copies = has_own_copies || parameter.requires_grad();
    }
    if (!parameter.grad().defined()) continue;
    norm->add(parameter.grad());
    gradients.push_back(parameter.grad());
  }
  for (const auto& group : groups) {
    const Norm& own = sharded.at(group.get());
    if (own.is_max()) {
      total.add_power(group->max(own.power(), "gradient norm"));
      continue;
    }
    at::Tensor sum = torch::full({1}, own.power(), at::device(group->device()).dtype(at::kDouble));
    group->all_reduce(sum, "gradient norm").wait();
    total.add_power(sum.item<double>());
  }
  if (const auto group = has_own_copies ? group_of_model(root) : nullptr) {
    // Takes the largest, so that all ranks scale their shards of the other gradients equally.
    total.add_power(group->max(own_copies.power(), "gradient norm"));
  } else {
    total.add_power(own_copies.power());
  }
  const double norm = total.value();
  const double factor = max_norm / (norm + 1e-6);  // as torch.nn.utils.clip_grad_norm_
  // Scales also if the norm is NaN: then all gradients become NaN, as in PyTorch.
  if (!(factor >= 1)) {
    for (at::Tensor& gradient : gradients) gradient.mul_(factor);
  }
  return norm;
}

}  // namespace tessera
