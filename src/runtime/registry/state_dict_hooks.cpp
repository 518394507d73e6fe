#include "tessera/runtime/registry/state_dict_hooks.h"

#include <torch/types.h>

#include <algorithm>
#include <utility>

#include "base/cast.h"
#include "runtime/registry/own_state_dict_hooks.h"
#include "runtime/torch_bridge.h"

namespace tessera {

void LoadReport::add(std::string rule, std::string fqn, std::string expected, std::string found) {
  problems.push_back({formats::Finding::Severity::error,
                      std::move(rule),
                      {.fqn = std::move(fqn)},
                      std::move(expected),
                      std::move(found)});
}

namespace {

/// Returns a text that says what is wrong with a shard; empty if the shard is valid.
std::string shard_error(const StateTensor& whole, const LocalShard& shard) {
  if (auto error = region_error(shard.region, whole.shape))
    return "a region that does not fit (" + *error + ")";
  if (!shard.tensor.defined()) return "no tensor";
  if (shard.tensor.layout() != at::kStrided) return "a tensor that is not dense";
  if (shard.tensor.numel() != numel_of(shard.region)) {
    return std::to_string(shard.tensor.numel()) + " elements for " + region_to_string(shard.region);
  }
  if (!shard.tensor.is_contiguous()) return "a tensor that is not contiguous";
  const DType dtype = dtype_of(shard.tensor.scalar_type());
  if (dtype != whole.dtype) return std::string(dtype_name(dtype));
  return {};
}

/// Returns how many numbers of this rank's shards would become infinite, or NaN, as `dtype`.
std::int64_t count_too_large(const StateTensor& tensor, DType dtype) {
  if (tensor.dtype == dtype ||
      (can_cast(tensor.dtype, dtype) && !can_overflow(tensor.dtype, dtype)))
    return 0;
  const at::NoGradGuard no_grad;
  constexpr std::int64_t kMostAtOnce = std::int64_t{1} << 20;  // elements; bounds the memory
  // The functions below do not know the dtypes of 8 bits.
  const auto readable = [](const at::Tensor& numbers) {
    return numbers.element_size() == 1 ? numbers.to(at::kFloat) : numbers;
  };
  std::int64_t num_too_large = 0;
  for (const LocalShard& shard : tensor.local_shards) {
    if (shard.tensor.is_meta()) continue;
    for (const at::Tensor& part : shard.tensor.detach().view({-1}).split(kMostAtOnce)) {
      const at::Tensor from = readable(part);
      const at::Tensor to = readable(part.to(scalar_type_of(dtype)));
      const at::Tensor is_kept =
          to.isfinite().logical_or(from.isnan()).logical_or(from.isinf().logical_and(to.isinf()));
      num_too_large += is_kept.logical_not().sum().item<std::int64_t>();
    }
  }
  return num_too_large;
}

}  // namespace

StateTensor* find_fitting(StateDict& state_dict, const std::string& fqn, DType dtype,
                          std::span<const std::int64_t> shape, LoadReport& report) {
  StateEntry* entry = state_dict.find(fqn);
  if (entry != nullptr && std::holds_alternative<StateAlias>(*entry)) {
    entry = state_dict.find(std::get<StateAlias>(*entry).target);
  }
  if (entry == nullptr) {
    if (!report.options.allow_missing) report.add("missing", fqn, "a tensor", "none");
    return nullptr;
  }
  auto* const tensor = std::get_if<StateTensor>(entry);
  if (tensor == nullptr) {
    report.add("missing", fqn, "a tensor", "a value that is not a tensor");
    return nullptr;
  }
  if (!std::ranges::equal(tensor->shape, shape)) {
    report.add("shape", fqn, shape_to_string(shape), shape_to_string(tensor->shape));
    return nullptr;
  }
  const bool may_cast =
      report.options.allow_cast && is_floating_point(tensor->dtype) && is_floating_point(dtype);
  if (tensor->dtype != dtype && !may_cast) {
    report.add("dtype", fqn, std::string(dtype_name(dtype)),
               std::string(dtype_name(tensor->dtype)));
    return nullptr;
  }
  for (const LocalShard& shard : tensor->local_shards) {
    const std::string error = shard_error(*tensor, shard);
    if (error.empty()) continue;
    report.add("shard", fqn, "a contiguous shard inside the tensor, of the tensor's dtype", error);
    return nullptr;
  }
  if (const std::int64_t number = count_too_large(*tensor, dtype); number > 0) {
    report.add("cast", fqn, "numbers that " + std::string(dtype_name(dtype)) + " can hold",
               number == 1 ? "1 element that is too large for it"
                           : std::to_string(number) + " elements that are too large for it");
    return nullptr;
  }
  return tensor;
}

namespace registry {
namespace {

/// When a hook runs among the hooks of its kind and module. The value is where its numbers begin.
enum class Turn : std::uint64_t {
  first = 0,
  in_order = std::uint64_t{1} << 32,
  last = std::uint64_t{1} << 33,
};

template <class Hook>
HookHandle add(torch::nn::Module& module, Hook hook,
               std::map<std::uint64_t, Hook> StateDictHooks::*table, Turn turn = Turn::in_order) {
  auto hooks = find<StateDictHooks>(module);
  if (!hooks) attach(module, hooks = std::make_shared<StateDictHooks>());
  const std::uint64_t number = static_cast<std::uint64_t>(turn) + hooks->next_number++;
  ((*hooks).*table).emplace(number, std::move(hook));
  return HookHandle([weak = std::weak_ptr(hooks), table, number] {
    if (const auto alive = weak.lock()) ((*alive).*table).erase(number);
  });
}

}  // namespace

HookHandle add_state_dict_pre_hook(torch::nn::Module& module, StateDictPreHook hook) {
  return add(module, std::move(hook), &StateDictHooks::pre);
}
HookHandle add_state_dict_post_hook(torch::nn::Module& module, StateDictPostHook hook) {
  return add(module, std::move(hook), &StateDictHooks::post);
}
HookHandle add_load_state_dict_pre_hook(torch::nn::Module& module, LoadPreHook hook) {
  return add(module, std::move(hook), &StateDictHooks::load_pre);
}
HookHandle add_load_state_dict_post_hook(torch::nn::Module& module, LoadPostHook hook) {
  return add(module, std::move(hook), &StateDictHooks::load_post);
}
bool is_own_post_hook(std::uint64_t number) {
  return number < static_cast<std::uint64_t>(Turn::in_order);
}
HookHandle add_first_state_dict_post_hook(torch::nn::Module& module, StateDictPostHook hook) {
  return add(module, std::move(hook), &StateDictHooks::post, Turn::first);
}
HookHandle add_last_load_state_dict_pre_hook(torch::nn::Module& module, LoadPreHook hook) {
  return add(module, std::move(hook), &StateDictHooks::load_pre, Turn::last);
}

}  // namespace registry
}  // namespace tessera
