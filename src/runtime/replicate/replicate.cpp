#include "tessera/runtime/replicate/replicate.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/types.h>

#include <algorithm>
#include <mutex>

#include "runtime/dist/sync_states.h"
#include "runtime/registry/end_of_backward.h"
#include "runtime/weak_tensor.h"
#include "tessera/base/error.h"
#include "tessera/runtime/registry/fused_updates.h"
#include "tessera/runtime/registry/registry.h"

namespace tessera {
namespace {

using at::Tensor;
using torch::nn::Module;
using ModulePtr = std::shared_ptr<Module>;

/// Whether a module within reduces its gradients by itself.
bool is_closed(const Module& module) {
  return registry::applied_api(module) == "shard";
}

/// Visits a module and all below it, but for those that are closed, with their prefixes.
template <class Visit>
void for_each_open_module(Module& module, const std::string& prefix, const Visit& visit) {
  registry::refuse_own_updates(module, prefix, "replicate");
  visit(module, prefix);
  for (const auto& child : module.named_children()) {
    if (!is_closed(*child.value())) {
      for_each_open_module(*child.value(), prefix + child.key() + ".", visit);
    }
  }
}

/// Averages the gradients of a module's parameters. Buckets start in one order on all ranks,
/// whatever the order in which gradients come. A gradient that comes after its bucket has left
/// (recomputation, a parameter used twice) makes it leave once more.
class Reducer final : public registry::PassMember, public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(const ModulePtr& module, ReplicateOptions options)
      : module_(module), options_(std::move(options)) {}

  void take(const std::vector<std::pair<std::string, Tensor>>& parameters);

  void begin_forward() override;
  void set_gradient_sync(registry::GradientSync sync) override {
    const std::lock_guard lock(mutex_);
    sync_ = sync;
  }

  void gradient_ready(std::size_t parameter);

 private:
  struct Parameter {
    std::string fqn;
    WeakTensor tensor;
    std::size_t bucket;
    std::int64_t offset;
    std::int64_t numel;
    bool is_pending = false;  // has a gradient that other ranks have not seen
  };
  struct Bucket {
    std::vector<std::size_t> parameters;
    std::int64_t numel = 0;
    at::TensorOptions tensor_options{};
    std::size_t num_ready = 0;  // in this backward
    bool is_late = false;       // a gradient came after it had left
    Tensor flat;                // [numel + one flag per parameter] while it travels
    dist::Pending pending;
  };

  void send(Bucket& bucket);
  void receive(Bucket& bucket);
  void end_backward();
  void reset();

  std::mutex mutex_;
  std::weak_ptr<Module> module_;
  ReplicateOptions options_;
  registry::GradientSync sync_ = registry::GradientSync::on;
  std::vector<Parameter> parameters_;
  std::vector<Bucket> buckets_;
  std::vector<bool> was_ready_;  // parallel to parameters_, in this backward
  std::size_t num_sent_ = 0;     // buckets that have left, from the first on
  registry::EndOfBackward end_of_backward_;
};

/// Sits on each parameter.
class ReadyHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  ReadyHook(std::shared_ptr<Reducer> reducer, std::size_t parameter)
      : reducer_(std::move(reducer)), parameter_(parameter) {}
  void operator()(const Tensor& /*parameter*/) override { reducer_->gradient_ready(parameter_); }

 private:
  std::shared_ptr<Reducer> reducer_;
  std::size_t parameter_;
};

void Reducer::take(const std::vector<std::pair<std::string, Tensor>>& parameters) {
  // Gradients of the last layers come first.
  for (auto it = parameters.rbegin(); it != parameters.rend(); ++it) {
    const auto& [fqn, tensor] = *it;
    const at::TensorOptions tensor_options = tensor.options().requires_grad(false);
    const auto fits = [&](const Bucket& bucket) {
      return bucket.tensor_options.dtype() == tensor_options.dtype() &&
             bucket.tensor_options.device() == tensor_options.device() &&
             bucket.numel * tensor.element_size() < options_.bucket_nbytes;
    };
    auto bucket = std::ranges::find_if(buckets_, fits);
    if (bucket == buckets_.end()) {
      bucket = buckets_.emplace(bucket);
      bucket->tensor_options = tensor_options;
    }
    bucket->parameters.push_back(parameters_.size());
    parameters_.push_back({fqn, WeakTensor(tensor),
                           static_cast<std::size_t>(bucket - buckets_.begin()), bucket->numel,
                           tensor.numel()});
    bucket->numel += tensor.numel();
    torch::autograd::impl::set_post_acc_grad_hooks(
        tensor, std::make_unique<ReadyHook>(shared_from_this(), parameters_.size() - 1));
  }
  was_ready_.resize(parameters_.size());
}

void Reducer::begin_forward() {
  if (options_.buffers == ReplicateOptions::Buffers::keep) return;
  const ModulePtr module = module_.lock();
  if (!module || !module->is_training() || sync_ == registry::GradientSync::off) return;
  dist::StateSync sync(*options_.mesh.world());
  for_each_open_module(*module, "", [&](const Module& each, const std::string& prefix) {
    for (const auto& buffer : each.named_buffers(/*recurse=*/false)) {
      sync.sync(prefix + buffer.key(), buffer.value());
    }
  });
}

void Reducer::gradient_ready(std::size_t index) {
  const std::lock_guard lock(mutex_);
  Parameter& parameter = parameters_[index];
  parameter.is_pending = true;
  if (sync_ == registry::GradientSync::off) return;
  if (parameter.tensor.lock().grad().layout() != at::kStrided) {
    throw Error::expected(ErrorKind::unsupported, {.fqn = parameter.fqn},
                          "parameter of a replicated module", "a dense gradient", "a sparse one",
                          "an embedding made with sparse(true)?");
  }
  if (!end_of_backward_.is_queued()) {
    reset();  // what a backward that failed has left
    end_of_backward_.queue([self = shared_from_this()] { self->end_backward(); });
  }
  Bucket& bucket = buckets_[parameter.bucket];
  if (parameter.bucket < num_sent_) bucket.is_late = true;
  if (was_ready_[index]) return;
  was_ready_[index] = true;
  ++bucket.num_ready;
  while (num_sent_ < buckets_.size() &&
         buckets_[num_sent_].num_ready == buckets_[num_sent_].parameters.size()) {
    send(buckets_[num_sent_++]);
  }
}

void Reducer::send(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  const auto num_parameters = static_cast<std::int64_t>(bucket.parameters.size());
  bucket.flat = torch::empty({bucket.numel + num_parameters}, bucket.tensor_options);
  const Tensor flags = bucket.flat.narrow(0, bucket.numel, num_parameters).zero_();
  for (std::size_t i = 0; i < bucket.parameters.size(); ++i) {
    const Parameter& parameter = parameters_[bucket.parameters[i]];
    const Tensor slot = bucket.flat.narrow(0, parameter.offset, parameter.numel);
    const Tensor tensor = parameter.tensor.lock();
    if (tensor.defined() && tensor.grad().defined()) {
      slot.view(tensor.sizes()).copy_(tensor.grad());
    } else {
      slot.zero_();
    }
    if (parameter.is_pending) flags[static_cast<std::int64_t>(i)].fill_(1);
  }
  bucket.flat.narrow(0, 0, bucket.numel).div_(options_.mesh.world_size());
  bucket.is_late = false;
  bucket.pending = options_.mesh.world()->all_reduce(
      bucket.flat, "gradients of " + parameters_[bucket.parameters.front()].fqn);
}

void Reducer::receive(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  bucket.pending.wait();
  const Tensor flags =
      bucket.flat.narrow(0, bucket.numel, static_cast<std::int64_t>(bucket.parameters.size()))
          .to(at::kCPU, at::kFloat);
  for (std::size_t i = 0; i < bucket.parameters.size(); ++i) {
    Parameter& parameter = parameters_[bucket.parameters[i]];
    parameter.is_pending = false;
    Tensor tensor = parameter.tensor.lock();
    if (!tensor.defined() || flags.data_ptr<float>()[i] == 0) continue;
    const Tensor slot =
        bucket.flat.narrow(0, parameter.offset, parameter.numel).view(tensor.sizes());
    if (tensor.grad().defined()) {
      tensor.mutable_grad().copy_(slot);
    } else {
      tensor.mutable_grad() = slot.clone();
    }
  }
  bucket.flat = Tensor();
}

void Reducer::end_backward() {
  const std::lock_guard lock(mutex_);
  try {
    for (; num_sent_ < buckets_.size(); ++num_sent_) send(buckets_[num_sent_]);
    for (Bucket& bucket : buckets_) {
      if (!bucket.is_late) continue;
      bucket.pending.wait();
      send(bucket);
    }
    for (Bucket& bucket : buckets_) receive(bucket);
  } catch (...) {
    reset();
    throw;
  }
  reset();
}

void Reducer::reset() {
  for (Bucket& bucket : buckets_) {
    bucket.num_ready = 0;
    bucket.is_late = false;
    bucket.flat = Tensor();
  }
  was_ready_.assign(was_ready_.size(), false);
  num_sent_ = 0;
  end_of_backward_.forget();
}

void refuse_applied(const Module& module, const std::string& fqn) {
  if (const auto api = registry::applied_api(module)) {
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = fqn}, "replicate",
                          "a module that no API was applied to", *api + " applied to it");
  }
  for (const auto& child : module.named_children()) {
    if (is_closed(*child.value())) continue;
    refuse_applied(*child.value(), fqn.empty() ? child.key() : fqn + "." + child.key());
  }
}

}  // namespace

void replicate(Module& module, const ReplicateOptions& options) {
  const ModulePtr owner = registry::weak_module(module).lock();
  refuse_applied(module, "");
  std::vector<std::pair<std::string, Tensor>> parameters;
  const auto take = [&](const std::string& fqn, const Tensor& parameter) {
    const auto is_same = [&](const Tensor& each) { return each.is_same(parameter); };
    const bool is_left_out =
        !parameter.defined() || !parameter.requires_grad() ||
        std::ranges::any_of(options.ignored_states, is_same) ||
        std::ranges::any_of(parameters, [&](const auto& each) { return is_same(each.second); });
    if (is_left_out) return;
    if (torch::autograd::impl::post_acc_grad_hooks(parameter)) {
      throw Error::expected(ErrorKind::invalid_argument, {.fqn = fqn},
                            "parameter of a module to be replicated", "one that is no other API's",
                            "one that a module elsewhere had taken over",
                            "a weight tied to one of a sharded module? ignored_states leaves it "
                            "out");
    }
    parameters.emplace_back(fqn, parameter);
  };
  for_each_open_module(module, "", [&](const Module& each, const std::string& prefix) {
    for (const auto& parameter : each.named_parameters(/*recurse=*/false)) {
      take(prefix + parameter.key(), parameter.value());
    }
  });
  if (options.module_states == ReplicateOptions::ModuleStates::sync) {
    dist::StateSync sync(*options.mesh.world());
    for_each_open_module(module, "", [&](const Module& each, const std::string& prefix) {
      for (const auto& parameter : each.named_parameters(/*recurse=*/false)) {
        sync.sync(prefix + parameter.key(), parameter.value());
      }
    });
    for_each_open_module(module, "", [&](const Module& each, const std::string& prefix) {
      for (const auto& buffer : each.named_buffers(/*recurse=*/false)) {
        sync.sync(prefix + buffer.key(), buffer.value());
      }
    });
  }
  const auto reducer = std::make_shared<Reducer>(owner, options);
  reducer->take(parameters);
  registry::attach<registry::PassMember>(module, reducer);
  registry::note_applied(module, "replicate", options.mesh);
}

}  // namespace tessera
