#include "tessera/runtime/replicate/replicate.h"

#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/types.h>

#include <algorithm>
#include <mutex>
#include <span>
#include <unordered_set>

#include "runtime/dist/consensus.h"
#include "runtime/dist/sync_states.h"
#include "runtime/keep_freed_memory.h"
#include "runtime/registry/end_of_backward.h"
#include "runtime/registry/gradient_hook.h"
#include "runtime/registry/mesh_around.h"
#include "runtime/replicate/add_and_multiply.h"
#include "runtime/torch_bridge.h"
#include "runtime/weak_tensor.h"
#include "tessera/base/error.h"
#include "tessera/runtime/registry/fused_updates.h"
#include "tessera/runtime/registry/registry.h"

namespace tessera {
namespace {

using at::Tensor;
using torch::nn::Module;
using ModulePtr = std::shared_ptr<Module>;

/// The alignment of gradients in a bucket, for vectorised kernels.
constexpr std::int64_t kAlignmentNbytes = 16;

/// Returns the strides of a tensor, without those of dimensions of size 1, which mean nothing.
std::vector<std::int64_t> strides_of(const Tensor& tensor) {
  std::vector<std::int64_t> strides;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1) strides.push_back(tensor.stride(d));
  }
  return strides;
}

/// Returns whether the elements of two tensors lie in the same order in memory, without gaps.
bool are_alike_in_memory(const Tensor& a, const Tensor& b) {
  return a.is_non_overlapping_and_dense() && a.is_same_size(b) && strides_of(a) == strides_of(b) &&
         a.options().type_equal(b.options()) && a.is_neg() == b.is_neg() && !b._is_zerotensor();
}

/// Runs the loop of add_and_multiply.h on several threads. Requires: the tensors are alike in
/// memory, on the CPU, with elements of type T.
template <class T>
void add_and_multiply_on_cpu(const Tensor& sum, const Tensor& addend, double factor) {
  T* const to = sum.mutable_data_ptr<T>();
  const T* const from = addend.const_data_ptr<T>();
  at::parallel_for(
      0, sum.numel(), at::internal::GRAIN_SIZE, [&](std::int64_t begin, std::int64_t end) {
        add_and_multiply(to + begin, from + begin, static_cast<T>(factor), end - begin);
      });
}

/// Sets `sum` to (sum + addend) * factor; for most tensors on the CPU in one pass over memory.
void add_then_multiply(const Tensor& sum, const Tensor& addend, double factor) {
  const bool has_loop = sum.is_cpu() && are_alike_in_memory(sum, addend);
  if (has_loop && sum.scalar_type() == at::kFloat) {
    add_and_multiply_on_cpu<float>(sum, addend, factor);
  } else if (has_loop && sum.scalar_type() == at::kDouble) {
    add_and_multiply_on_cpu<double>(sum, addend, factor);
  } else {
    sum.add_(addend).mul_(factor);
  }
}

/// Returns whether a module averages its gradients by itself, as sharded embedding tables do.
bool is_closed(const Module& module) {
  return registry::applied_api(module) == "shard";
}

/// Visits a module and all modules below it with their prefixes, except modules that average their
/// gradients by themselves.
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

/// Averages the gradients of a module's parameters. When a backward begins, the `.grad`s of earlier
/// ones are put aside, so that autograd does not add to them in a pass of its own. A gradient that
/// is ready moves, with the one that was put aside, into its parameter's bucket. A bucket with all
/// its gradients is sent (all-reduced), in the same order on all ranks. After the average, `.grad`s
/// are views into the buckets. A gradient that is ready when its bucket was sent already
/// (recomputation, two uses) is late: the bucket is sent again with the late gradients only. The
/// last bucket is sent at the end of the backward. Its flags tell all ranks which buckets have late
/// gradients.
class Reducer final : public registry::PassMember, public std::enable_shared_from_this<Reducer> {
 public:
  /// `group`: all ranks; used by this Reducer only.
  Reducer(const ModulePtr& module, ReplicateOptions options, std::shared_ptr<dist::Group> group)
      : module_(module), options_(std::move(options)), group_(std::move(group)) {}

  void take(const std::vector<std::pair<std::string, Tensor>>& parameters);

  void begin_forward() override;
  void begin_backward() override;
  void set_gradient_sync(registry::GradientSync sync) override {
    const std::lock_guard lock(mutex_);
    num_scopes_without_sync_ += sync == registry::GradientSync::off ? 1 : -1;
  }

  void gradient_ready(std::size_t parameter);

 private:
  struct Parameter {
    std::string fqn;
    WeakTensor tensor;
    std::size_t bucket;
    std::int64_t offset;
    std::int64_t numel;
    bool is_pending = false;  // the parameter has a gradient that is not averaged yet
    bool is_moved = false;    // its gradient moved into its bucket in this backward
    bool is_late = false;     // a gradient came after the bucket was sent
    // Since the last `make_room`: `.grad` was set to its part of the bucket, or `show` has run.
    bool has_slot = false;
    Tensor put_aside{};  // its `.grad` from before this backward, until it moves into the bucket
    Tensor unused{};     // its old gradient, if this backward did not use the parameter
    Tensor late{};       // its late gradient
  };
  struct Bucket {
    std::vector<std::size_t> parameters;
    std::int64_t numel = 0;
    std::int64_t max_nbytes = 0;  // a bucket of this size or more takes no further parameter
    // Dtype and device of its parameters when replicate was called.
    at::TensorOptions tensor_options{};
    std::size_t num_ready = 0;  // gradients that are ready in this backward
    Tensor flat;                // [numel + flags]
    dist::Pending pending;
  };

  /// Returns the factor by which each rank multiplies its gradient before the sum. DDP does the
  /// same, so results round equally.
  double share() const { return 1.0 / group_->size(); }
  bool is_last(const Bucket& bucket) const { return &bucket == &buckets_.back(); }
  bool syncs() const { return num_scopes_without_sync_ == 0; }
  bool has_late(const Bucket& bucket) const;
  static bool is_movable(const Parameter& parameter, const Tensor& tensor);
  void check_tree(Module& module) const;
  void begin();
  void put_gradients_aside();
  void give_up_failed();
  Tensor slot_of(const Parameter& parameter, const Tensor& tensor) const;
  at::TensorOptions options_of(const Bucket& bucket) const;
  void allocate(Bucket& bucket) const;
  void make_room(Bucket& bucket);
  void accumulate_in_bucket(Parameter& parameter);
  void move(Parameter& parameter) const;
  void send(Bucket& bucket);
  void show(Bucket& bucket, const std::vector<bool>& is_used);
  void add_late(Bucket& bucket);
  void start_average(Bucket& bucket, const std::vector<float>& flags) const;
  std::vector<std::vector<bool>> finish_averages(std::span<Bucket> buckets) const;
  void end_backward();
  void receive_all();
  void drop();
  void reset();

  std::mutex mutex_;
  std::weak_ptr<Module> module_;
  ReplicateOptions options_;
  std::shared_ptr<dist::Group> group_;
  int num_scopes_without_sync_ = 0;
  std::vector<Parameter> parameters_;
  std::vector<Bucket> buckets_;
  std::size_t num_sent_ = 0;  // the first num_sent_ buckets were sent
  bool is_running_ = false;   // a backward has begun and not ended
  registry::EndOfBackward end_of_backward_;
};

/// The hook of each parameter in a bucket. Reports that the parameter's gradient is ready.
class ReadyHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  ReadyHook(std::shared_ptr<Reducer> reducer, std::size_t parameter)
      : reducer_(std::move(reducer)), parameter_(parameter) {}
  void operator()(const Tensor& /*parameter*/) override { reducer_->gradient_ready(parameter_); }

 private:
  std::shared_ptr<Reducer> reducer_;
  std::size_t parameter_;
};

/// The hook of each parameter that was frozen when replicate was called and so has no bucket.
/// Throws if the parameter gets a gradient.
class RefusingHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit RefusingHook(std::string fqn) : fqn_(std::move(fqn)) {}
  void operator()(const Tensor& /*parameter*/) override {
    throw Error::expected(ErrorKind::unsupported, {.fqn = fqn_}, "gradient in a replicated module",
                          "no gradient, as the parameter was frozen when replicate was called",
                          "a gradient",
                          "call replicate first, then freeze the parameters that you train later");
  }

 private:
  std::string fqn_;
};

void Reducer::take(const std::vector<std::pair<std::string, Tensor>>& parameters) {
  // Fills buckets from the last parameter on, because a backward computes the gradients of the last
  // layers first. A bucket is full at half of what is left (at least 1 MiB), or at `bucket_nbytes`.
  // So the last buckets are small, because the end of the backward waits for them.
  constexpr std::int64_t kMinNbytes = std::int64_t{1} << 20;
  std::int64_t nbytes_left = 0;
  for (const auto& parameter : parameters) {
    nbytes_left += static_cast<std::int64_t>(parameter.second.nbytes());
  }
  for (auto it = parameters.rbegin(); it != parameters.rend(); ++it) {
    const auto& [fqn, tensor] = *it;
    const at::TensorOptions tensor_options = tensor.options().requires_grad(false);
    const auto fits = [&](const Bucket& bucket) {
      return bucket.tensor_options.dtype() == tensor_options.dtype() &&
             bucket.tensor_options.device() == tensor_options.device() &&
             bucket.numel * tensor.element_size() < bucket.max_nbytes;
    };
    auto bucket = std::ranges::find_if(buckets_, fits);
    if (bucket == buckets_.end()) {
      bucket = buckets_.emplace(bucket);
      bucket->tensor_options = tensor_options;
      bucket->max_nbytes = std::min(options_.bucket_nbytes, std::max(kMinNbytes, nbytes_left / 2));
    }
    nbytes_left -= static_cast<std::int64_t>(tensor.nbytes());
    bucket->parameters.push_back(parameters_.size());
    parameters_.push_back({fqn, WeakTensor(tensor),
                           static_cast<std::size_t>(bucket - buckets_.begin()), bucket->numel,
                           tensor.numel()});
    const auto alignment = kAlignmentNbytes / static_cast<std::int64_t>(tensor.element_size());
    bucket->numel += (tensor.numel() + alignment - 1) / alignment * alignment;
    torch::autograd::impl::set_post_acc_grad_hooks(
        tensor, std::make_unique<ReadyHook>(shared_from_this(), parameters_.size() - 1));
  }
}

void Reducer::begin_forward() {
  {
    const std::lock_guard lock(mutex_);
    if (!end_of_backward_.is_queued()) give_up_failed();
  }
  const ModulePtr module = module_.lock();
  if (!module) return;
  check_tree(*module);
  if (options_.buffers == ReplicateOptions::Buffers::keep) return;
  if (!module->is_training() || !syncs()) return;
  dist::StateSync sync(*group_);
  for_each_open_module(*module, "", [&](const Module& each, const std::string& prefix) {
    for (const auto& buffer : each.named_buffers(/*recurse=*/false)) {
      sync.sync(prefix + buffer.key(), buffer.value());
    }
  });
}

/// Throws if a parameter was replaced, added or removed after replicate was called, because the
/// gradient of a new parameter would not be averaged.
void Reducer::check_tree(Module& module) const {
  std::unordered_set<const at::TensorImpl*> in_tree;
  for (const Tensor& ignored : options_.ignored_states) {
    in_tree.insert(ignored.unsafeGetTensorImpl());
  }
  const auto fail = [](const std::string& fqn, const std::string& found) {
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = fqn},
                          "parameter of a replicated module",
                          "the parameter that was there when replicate was called", found,
                          "call replicate after the last change to the module's parameters");
  };
  for_each_open_module(module, "", [&](const Module& each, const std::string& prefix) {
    for (const auto& parameter : each.named_parameters(/*recurse=*/false)) {
      const Tensor& tensor = parameter.value();
      if (!tensor.defined() || !in_tree.insert(tensor.unsafeGetTensorImpl()).second) continue;
      if (tensor.requires_grad() && registry::gradient_hook(tensor) == nullptr) {
        fail(prefix + parameter.key(), "another parameter");
      }
    }
  });
  for (const Parameter& parameter : parameters_) {
    const Tensor tensor = parameter.tensor.lock();
    if (!tensor.defined() || !in_tree.contains(tensor.unsafeGetTensorImpl())) {
      fail(parameter.fqn, "no parameter, or a new tensor, of this name");
    }
  }
}

// With recomputation, a backward may run inside another one. Gradients are then averaged at the end
// of the outer one.
void Reducer::begin_backward() {
  const std::lock_guard lock(mutex_);
  if (syncs() && !buckets_.empty()) begin();
}

void Reducer::begin() {
  if (end_of_backward_.is_queued()) return;
  give_up_failed();
  end_of_backward_.queue([self = shared_from_this()] { self->end_backward(); });
  is_running_ = true;
  put_gradients_aside();
}

void Reducer::put_gradients_aside() {
  for (Parameter& parameter : parameters_) {
    const Tensor tensor = parameter.tensor.lock();
    if (!tensor.defined() || !tensor.grad().defined()) continue;
    if (is_movable(parameter, tensor)) {
      parameter.put_aside = std::exchange(tensor.mutable_grad(), Tensor());
    }
  }
}

/// Returns whether `.grad` can move into a bucket. If not, it stays where it is until
/// `gradient_ready` refuses it.
bool Reducer::is_movable(const Parameter& parameter, const Tensor& tensor) {
  const Tensor& gradient = tensor.grad();
  return tensor.numel() == parameter.numel && gradient.layout() == at::kStrided &&
         gradient.is_same_size(tensor) && !gradient.requires_grad() &&
         gradient.options().type_equal(tensor.options());
}

void Reducer::gradient_ready(std::size_t index) {
  const std::lock_guard lock(mutex_);
  Parameter& parameter = parameters_[index];
  parameter.is_pending = true;
  if (!syncs()) return accumulate_in_bucket(parameter);
  const Tensor tensor = parameter.tensor.lock();
  if (tensor.numel() != parameter.numel) {
    throw Error::expected(
        ErrorKind::unsupported, {.fqn = parameter.fqn}, "parameter of a replicated module",
        std::to_string(parameter.numel) + " elements, as when replicate was called",
        std::to_string(tensor.numel()));
  }
  if (tensor.grad().layout() != at::kStrided) {
    throw Error::expected(ErrorKind::unsupported, {.fqn = parameter.fqn},
                          "parameter of a replicated module", "a dense gradient",
                          "a sparse gradient", "is it an embedding with sparse(true)?");
  }
  if (tensor.grad().requires_grad()) {
    throw Error::expected(ErrorKind::unsupported, {.fqn = parameter.fqn},
                          "parameter of a replicated module", "a gradient without a graph",
                          "a gradient with a graph", "replicate does not support create_graph");
  }
  begin();
  Bucket& bucket = buckets_[parameter.bucket];
  if (parameter.bucket < num_sent_) {
    parameter.is_late = true;  // the gradient stays in `.grad` until the end of the backward
    return;
  }
  if (bucket.num_ready == 0) make_room(bucket);
  if (!parameter.is_moved) ++bucket.num_ready;
  move(parameter);
  while (!is_last(buckets_[num_sent_]) &&
         buckets_[num_sent_].num_ready == buckets_[num_sent_].parameters.size()) {
    send(buckets_[num_sent_++]);
  }
}

/// Returns a parameter's part of its bucket, with the parameter's strides. For autograd the result
/// is not a view, because `zero_grad` cannot detach a view in place.
Tensor Reducer::slot_of(const Parameter& parameter, const Tensor& tensor) const {
  const Tensor& flat = buckets_[parameter.bucket].flat;
  if (tensor.is_non_overlapping_and_dense()) {
    return flat.as_strided(tensor.sizes(), tensor.strides(), parameter.offset).variable_data();
  }
  return flat.narrow(0, parameter.offset, tensor.numel()).view(tensor.sizes()).variable_data();
}

/// Returns the device and dtype for a bucket. Asks the parameters anew, because the module may have
/// been moved or partly converted: device of the first one, dtype to which all of them promote.
at::TensorOptions Reducer::options_of(const Bucket& bucket) const {
  std::optional<at::TensorOptions> found;
  for (const std::size_t index : bucket.parameters) {
    const Tensor tensor = parameters_[index].tensor.lock();
    if (!tensor.defined()) continue;
    if (!found) found = tensor.options().requires_grad(false);
    found = found->dtype(
        c10::promoteTypes(c10::typeMetaToScalarType(found->dtype()), tensor.scalar_type()));
  }
  return found.value_or(bucket.tensor_options);
}

/// Gives a bucket new memory filled with zeros.
void Reducer::allocate(Bucket& bucket) const {
  const std::size_t num_flags =
      bucket.parameters.size() + (is_last(bucket) ? buckets_.size() + 1 : 0);
  bucket.flat =
      torch::zeros({bucket.numel + static_cast<std::int64_t>(num_flags)}, options_of(bucket));
}

/// Gives a bucket new memory if any other tensor still uses its memory. To be called before the
/// first gradient moves into the bucket.
void Reducer::make_room(Bucket& bucket) {
  std::size_t num_known = 1;  // known users of the memory: the bucket itself, and `.grad`s in it
  for (const std::size_t index : bucket.parameters) {
    Parameter& parameter = parameters_[index];
    const Tensor tensor = parameter.tensor.lock();
    Tensor gradient = parameter.put_aside;
    if (!gradient.defined() && tensor.defined()) gradient = tensor.grad();
    parameter.has_slot = gradient.defined() && bucket.flat.defined() &&
                         gradient.is_alias_of(bucket.flat) &&
                         gradient.storage_offset() == parameter.offset;
    if (parameter.has_slot) ++num_known;
  }
  const bool is_free = bucket.flat.defined() &&
                       bucket.flat.options().type_equal(options_of(bucket)) &&
                       bucket.flat.storage().use_count() == num_known;
  if (is_free) return;
  for (const std::size_t index : bucket.parameters) parameters_[index].has_slot = false;
  allocate(bucket);
}

/// Moves a gradient that is not averaged yet into its bucket, so that later backwards add to it
/// there, and the gradients need no memory beside the buckets.
void Reducer::accumulate_in_bucket(Parameter& parameter) {
  const at::NoGradGuard no_grad;
  const Tensor tensor = parameter.tensor.lock();
  const Tensor& gradient = tensor.grad();
  Bucket& bucket = buckets_[parameter.bucket];
  if (bucket.flat.defined() && gradient.is_alias_of(bucket.flat)) return;
  if (parameter.has_slot || !bucket.flat.defined()) make_room(bucket);
  if (!is_movable(parameter, tensor) || !gradient.options().type_equal(bucket.flat.options())) {
    return;
  }
  Tensor slot = slot_of(parameter, tensor);
  slot.copy_(gradient);
  tensor.mutable_grad() = std::move(slot);
  parameter.has_slot = true;
}

/// Moves `.grad`, plus the gradient that was put aside, times share(), into the bucket. Adds it if
/// this backward has moved one before.
void Reducer::move(Parameter& parameter) const {
  const at::NoGradGuard no_grad;
  const Tensor tensor = parameter.tensor.lock();
  Tensor slot = slot_of(parameter, tensor);
  Tensor gradient = std::exchange(tensor.mutable_grad(), Tensor());
  Tensor earlier = std::exchange(parameter.put_aside, Tensor());
  if (!gradient.defined()) std::swap(gradient, earlier);
  for (Tensor* const each : {&gradient, &earlier}) {
    if (each->defined() && each->is_alias_of(slot) && each->strides() != slot.strides()) {
      *each = each->clone();  // because the parameter has other strides now
    }
  }
  if (earlier.defined()) {
    if (!earlier.is_alias_of(slot)) slot.copy_(earlier);
    add_then_multiply(slot, gradient, share());
  } else if (parameter.is_moved) {
    slot.add_(gradient * share());
  } else if (gradient.is_same_size(slot) && gradient.options().type_equal(slot.options())) {
    at::mul_out(slot, gradient, c10::scalar_to_tensor(share()));
  } else {
    slot.copy_(gradient).mul_(share());
  }
  parameter.is_moved = true;
}

void Reducer::start_average(Bucket& bucket, const std::vector<float>& flags) const {
  bucket.flat.narrow(0, bucket.numel, static_cast<std::int64_t>(flags.size()))
      .copy_(to_device(torch::tensor(flags), bucket.flat.device()));
  bucket.pending =
      group_->all_reduce(bucket.flat, "gradients of " + parameters_[bucket.parameters.front()].fqn);
}

/// Waits for the averages of buckets. Returns for each flag at the end of each bucket whether any
/// rank has set it. The host waits for the device once.
std::vector<std::vector<bool>> Reducer::finish_averages(std::span<Bucket> buckets) const {
  const at::NoGradGuard no_grad;
  std::vector<Tensor> on_host;
  std::unordered_set<at::Device> devices;
  for (Bucket& bucket : buckets) {
    bucket.pending.wait();
    const Tensor flags = bucket.flat.narrow(0, bucket.numel, bucket.flat.numel() - bucket.numel);
    if (flags.is_cpu()) {
      on_host.push_back(flags);
      continue;
    }
    on_host.push_back(pinned(flags.sizes(), flags.scalar_type()));
    on_host.back().copy_(flags, /*non_blocking=*/true);
    devices.insert(flags.device());
  }
  for (const at::Device device : devices) {
    c10::Event copied(device.type());
    copied.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    copied.synchronize();
  }
  std::vector<std::vector<bool>> is_set;
  for (const Tensor& each : on_host) {
    const Tensor flags = each.to(at::kFloat);
    const float* const begin = flags.const_data_ptr<float>();
    std::transform(begin, begin + flags.numel(), std::back_inserter(is_set.emplace_back()),
                   [](float flag) { return flag != 0; });
  }
  return is_set;
}

bool Reducer::has_late(const Bucket& bucket) const {
  return std::ranges::any_of(bucket.parameters,
                             [&](std::size_t index) { return parameters_[index].is_late; });
}

void Reducer::send(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  if (bucket.num_ready == 0) make_room(bucket);
  std::vector<float> flags;
  for (const std::size_t index : bucket.parameters) {
    Parameter& parameter = parameters_[index];
    const Tensor tensor = parameter.tensor.lock();
    // The user may have cleared a gradient that came under NoSyncScope.
    const bool has_one = parameter.is_moved || parameter.put_aside.defined() ||
                         (tensor.defined() && tensor.grad().defined());
    flags.push_back(has_one && parameter.is_pending ? 1.0F : 0.0F);
    if (!tensor.defined() || parameter.is_moved) continue;
    if (!has_one) {
      slot_of(parameter, tensor).zero_();
      continue;
    }
    if (!parameter.is_pending) {
      const Tensor& old = parameter.put_aside.defined() ? parameter.put_aside : tensor.grad();
      parameter.unused = old.is_alias_of(bucket.flat) ? old.clone() : old;
    }
    move(parameter);
  }
  if (is_last(bucket)) {
    for (const Bucket& each : buckets_) flags.push_back(has_late(each) ? 1.0F : 0.0F);
    flags.push_back(0);  // the flag for a failed backward
  }
  start_average(bucket, flags);
}

/// Sets `.grad` to the average for all parameters that any rank has used.
void Reducer::show(Bucket& bucket, const std::vector<bool>& is_used) {
  for (std::size_t i = 0; i < bucket.parameters.size(); ++i) {
    Parameter& parameter = parameters_[bucket.parameters[i]];
    parameter.is_pending = false;
    const Tensor unused = std::exchange(parameter.unused, Tensor());
    const Tensor tensor = parameter.tensor.lock();
    if (!tensor.defined()) continue;
    if (parameter.is_late) parameter.late = tensor.grad();
    tensor.mutable_grad() = is_used[i] ? slot_of(parameter, tensor).to(tensor.options()) : unused;
    parameter.has_slot = true;
  }
}

/// Averages the late gradients of all ranks and adds them to `.grad`.
void Reducer::add_late(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  const Tensor averages = std::exchange(bucket.flat, torch::zeros_like(bucket.flat));
  std::vector<float> flags;
  for (const std::size_t index : bucket.parameters) {
    Parameter& parameter = parameters_[index];
    const Tensor late = std::exchange(parameter.late, Tensor());
    flags.push_back(late.defined() ? 1.0F : 0.0F);
    if (!late.defined()) continue;
    slot_of(parameter, parameter.tensor.lock()).copy_(late).mul_(share());
  }
  start_average(bucket, flags);
  const std::vector<bool> is_late = finish_averages({&bucket, 1}).front();
  for (std::size_t i = 0; i < bucket.parameters.size(); ++i) {
    const Parameter& parameter = parameters_[bucket.parameters[i]];
    const Tensor tensor = parameter.tensor.lock();
    if (!is_late[i] || !tensor.defined()) continue;
    const Tensor average = slot_of(parameter, tensor);
    if (tensor.grad().defined()) {
      tensor.mutable_grad().add_(average);
    } else {
      tensor.mutable_grad() = average.clone();
    }
  }
  bucket.flat = averages;
}

// First all replicated modules send their buckets, then they wait, because different ranks may end
// their modules in different orders.
void Reducer::end_backward() {
  const std::lock_guard lock(mutex_);
  try {
    for (; num_sent_ < buckets_.size(); ++num_sent_) send(buckets_[num_sent_]);
  } catch (...) {
    drop();
    throw;
  }
  end_of_backward_.queue([self = shared_from_this()] { self->receive_all(); });
}

void Reducer::receive_all() {
  const std::lock_guard lock(mutex_);
  try {
    const std::vector<std::vector<bool>> flags = finish_averages(buckets_);
    if (flags.back().back()) {
      throw Error(ErrorKind::io, {},
                  "another rank of " + group_->name() +
                      " failed in the backward of the replicated module with " +
                      parameters_.back().fqn +
                      "; all ranks discard its gradients (see the error of the failed rank)");
    }
    for (std::size_t i = 0; i < buckets_.size(); ++i) show(buckets_[i], flags[i]);
    // Index of the first flag for a bucket.
    const std::size_t first = buckets_.back().parameters.size();
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
      if (flags.back()[first + i]) add_late(buckets_[i]);
    }
  } catch (...) {
    drop();
    throw;
  }
  reset();
}

/// Ends a backward that threw on this rank, when the next forward or backward begins. Until then,
/// other ranks may wait for this rank's buckets; now they get an error. Gradients in buckets are
/// dropped: restoring them would undo a later `zero_grad`.
void Reducer::give_up_failed() {
  if (!is_running_) return;
  const at::NoGradGuard no_grad;
  const std::size_t num_sent = num_sent_;
  reset();
  for (std::size_t i = num_sent; i < buckets_.size(); ++i) {
    Bucket& bucket = buckets_[i];
    allocate(bucket);
    if (is_last(bucket)) bucket.flat[-1].fill_(1);
    bucket.pending = group_->all_reduce(bucket.flat, "gradients of a backward that failed");
  }
  for (Bucket& bucket : buckets_) bucket.pending.wait();
}

/// Drops a backward whose collectives failed. Gradients that were not sent go back to `.grad`.
/// Gradients that were sent are lost, and their memory is not used again, because other ranks may
/// still read it.
void Reducer::drop() {
  const at::NoGradGuard no_grad;
  for (Parameter& parameter : parameters_) {
    const Tensor tensor = parameter.tensor.lock();
    if (!tensor.defined() || tensor.grad().defined()) continue;
    if (parameter.is_moved && parameter.bucket >= num_sent_) {
      tensor.mutable_grad() = slot_of(parameter, tensor).div(share());
    } else {
      tensor.mutable_grad() = parameter.unused.defined() ? parameter.unused : parameter.put_aside;
    }
  }
  for (std::size_t i = 0; i < num_sent_; ++i) {
    buckets_[i].flat = Tensor();
    buckets_[i].pending = {};
  }
  reset();
}

void Reducer::reset() {
  for (Bucket& bucket : buckets_) bucket.num_ready = 0;
  for (Parameter& parameter : parameters_) {
    parameter.is_moved = parameter.is_late = false;
    parameter.put_aside = parameter.unused = parameter.late = Tensor();
  }
  num_sent_ = 0;
  is_running_ = false;
  end_of_backward_.forget();
}

void refuse_applied(const Module& module, const std::string& fqn) {
  if (const auto api = registry::applied_api(module)) {
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = fqn}, "replicate",
                          "a module that is not sharded or replicated yet",
                          "a module that " + *api + " was applied to",
                          "call replicate on the outer module first, with the inner one's "
                          "parameters in ignored_states");
  }
  for (const auto& child : module.named_children()) {
    if (is_closed(*child.value())) continue;
    refuse_applied(*child.value(), fqn.empty() ? child.key() : fqn + "." + child.key());
  }
}

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

void refuse_unfit(const std::string& fqn, const Tensor& parameter) {
  if (registry::gradient_hook(parameter) != nullptr) {
    throw Error::expected(
        ErrorKind::invalid_argument, {.fqn = fqn}, "parameter for replicate",
        "a parameter that no other API manages", "a parameter that another module manages",
        "is it tied to a weight of a sharded or replicated module? put it into ignored_states");
  }
  if (parameter.is_meta() || !parameter.is_leaf()) {
    throw Error::expected(
        ErrorKind::invalid_argument, {.fqn = fqn}, "parameter for replicate",
        "a leaf tensor with memory",
        parameter.is_meta() ? "a tensor on the meta device" : "a tensor with a graph");
  }
}

/// The parameters of a module that are not ignored.
struct FoundParameters {
  NamedTensors trained;  // each tensor once; their gradients will be averaged
  NamedTensors frozen;   // each tensor once
  std::unordered_set<const at::TensorImpl*> all{};
};

FoundParameters find_parameters(Module& module, const std::vector<Tensor>& ignored) {
  FoundParameters found;
  const auto take = [&](const std::string& fqn, const Tensor& parameter) {
    const auto is_same = [&](const Tensor& each) { return each.is_same(parameter); };
    if (!parameter.defined() || std::ranges::any_of(ignored, is_same)) return;
    if (!found.all.insert(parameter.unsafeGetTensorImpl()).second) return;
    if (!parameter.requires_grad() && !parameter.is_meta()) {
      found.frozen.emplace_back(fqn, parameter);
      return;
    }
    refuse_unfit(fqn, parameter);
    found.trained.emplace_back(fqn, parameter);
  };
  for_each_open_module(module, "", [&](const Module& each, const std::string& prefix) {
    for (const auto& parameter : each.named_parameters(/*recurse=*/false)) {
      take(prefix + parameter.key(), parameter.value());
    }
  });
  return found;
}

/// Throws on all ranks if ranks have different parameters or buffers to replicate. Collective.
void require_equal_modules(Module& module, const FoundParameters& parameters,
                           const ReplicateOptions& options,
                           const std::shared_ptr<dist::Group>& group) {
  const bool syncs_parameters = options.module_states == ReplicateOptions::ModuleStates::sync;
  const bool syncs_buffers =
      syncs_parameters || options.buffers == ReplicateOptions::Buffers::broadcast;
  std::vector<std::string> lines{"buckets of " + std::to_string(options.bucket_nbytes) + " bytes"};
  const auto add_line = [&](const std::string& fqn, const Tensor& tensor,
                            const std::string& more = "") {
    lines.push_back(c10::str(fqn, " (", tensor.scalar_type(), ", ", tensor.sizes(), more, ")"));
  };
  for (const auto& [fqn, tensor] : parameters.trained) {
    // Gradients are averaged as they are in memory.
    add_line(fqn, tensor, tensor.is_contiguous() ? "" : c10::str(", strides ", strides_of(tensor)));
  }
  if (syncs_parameters) {
    for (const auto& [fqn, tensor] : parameters.frozen) add_line(fqn, tensor, ", frozen");
  }
  for_each_open_module(module, "", [&](const Module& each, const std::string& prefix) {
    for (const auto& buffer : each.named_buffers(/*recurse=*/false)) {
      if (syncs_buffers && buffer.value().defined()) {
        add_line(prefix + buffer.key(), buffer.value());
      }
    }
  });
  dist::Consensus(group).require_equal("parameters and buffers for replicate", lines);
}

/// Sends rank 0's parameters and buffers to all ranks, each tensor once. Collective.
void sync_module_states(Module& module, const FoundParameters& parameters, dist::Group& group) {
  dist::StateSync sync(group);
  for (const auto& [fqn, tensor] : parameters.trained) sync.sync(fqn, tensor);
  for (const auto& [fqn, tensor] : parameters.frozen) sync.sync(fqn, tensor);
  for_each_open_module(module, "", [&](const Module& each, const std::string& prefix) {
    for (const auto& buffer : each.named_buffers(/*recurse=*/false)) {
      sync.sync(prefix + buffer.key(), buffer.value());
    }
  });
}

}  // namespace

void replicate(Module& module, const ReplicateOptions& options) {
  const ModulePtr owner = registry::weak_module(module).lock();
  refuse_applied(module, "");
  const FoundParameters parameters = find_parameters(module, options.ignored_states);
  // Each replicated module has a connection (group) of its own. So the order between its
  // collectives and those of other modules may differ from rank to rank.
  const auto group = options.mesh.world()->separate("replicate");
  if (group->size() > 1) require_equal_modules(module, parameters, options, group);
  if (options.module_states == ReplicateOptions::ModuleStates::sync) {
    sync_module_states(module, parameters, *group);
  }
  const auto reducer = std::make_shared<Reducer>(owner, options, group);
  reducer->take(parameters.trained);
  keep_freed_memory();
  for (const auto& [fqn, tensor] : parameters.frozen) {
    if (registry::gradient_hook(tensor) != nullptr) continue;
    torch::autograd::impl::set_post_acc_grad_hooks(tensor, std::make_unique<RefusingHook>(fqn));
  }
  const auto is_managed = [&](const Tensor& parameter) {
    return parameters.all.contains(parameter.unsafeGetTensorImpl());
  };
  for_each_open_module(module, "", [&](Module& each, const std::string&) {
    registry::note_mesh_around(each, options.mesh, is_managed);
  });
  registry::attach<registry::PassMember>(module, reducer);
  registry::note_applied(module, "replicate", options.mesh);
}

}  // namespace tessera
