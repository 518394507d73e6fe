// All operators without a kernel in operators.cpp. They run on the CPU, directly on the device's
// memory, in stream order. at::native::cpu_fallback would copy to the CPU and back, and make the
// host wait.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "simulated_device/generators.h"
#include "simulated_device/memory.h"
#include "simulated_device/streams.h"

namespace tessera::sim {
namespace {

using at::Tensor;
using c10::IValue;

/// Replaces each tensor in an argument by `f(tensor)`.
template <class F>
IValue map_tensors(const IValue& value, const F& f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorVector()) list.push_back(f(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector()) {
      list.push_back(each && each->defined() ? std::optional(f(*each)) : each);
    }
    return list;
  }
  return value;
}

/// One call of an operator.
struct Call {
  const c10::OperatorHandle& op;
  std::string name;
  std::vector<IValue> args;
  at::Device device;
  std::vector<Tensor> reads{}, writes{};

  std::size_t num_results() const { return op.schema().returns().size(); }
  /// Whether result `i` is a new tensor, not an argument that is written to.
  bool is_new(std::size_t i) const { return op.schema().returns()[i].alias_info() == nullptr; }
  bool has_new() const {
    for (std::size_t i = 0; i < num_results(); ++i) {
      if (is_new(i)) return true;
    }
    return false;
  }
  bool is_written(std::size_t arg) const {
    const auto* const alias = op.schema().arguments()[arg].alias_info();
    return alias != nullptr && alias->isWrite();
  }
  /// Returns the argument that the operator writes to and returns as result `i`.
  const IValue& written_result(std::size_t i) const {
    for (std::size_t arg = 0; arg < args.size(); ++arg) {
      const auto* const alias = op.schema().arguments()[arg].alias_info();
      if (alias != nullptr && *alias == *op.schema().returns()[i].alias_info()) return args[arg];
    }
    TORCH_CHECK(false, "sim: a result of ", name,
                " is neither new nor an argument that it writes to");
  }
};

/// Returns whether an operator may have a CPU tensor with elements among its arguments, together
/// with tensors on the device.
bool takes_host_tensors(const std::string& name) {
  return name.starts_with("aten::index") || name.starts_with("aten::_index_put_impl_");
}

Call describe(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto num_args = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  Call call{.op = op,
            .name = c10::toString(op.operator_name()),
            .args = {stack.end() - num_args, stack.end()},
            .device = {kSim, current_device()}};
  std::optional<at::Device> device;
  for (std::size_t i = 0; i < call.args.size(); ++i) {
    map_tensors(call.args[i], [&](const Tensor& tensor) {
      if (is_on_device(tensor)) {
        if (!device) device = tensor.device();
        TORCH_CHECK(tensor.device() == *device, "sim: ", call.name, " got tensors on ", *device,
                    " and ", tensor.device());
        (call.is_written(i) ? call.writes : call.reads).push_back(tensor);
      } else {
        TORCH_CHECK(tensor.dim() == 0 || tensor.numel() == 0 || takes_host_tensors(call.name),
                    "sim: ", call.name, " got a tensor on ", tensor.device());
      }
      return tensor;
    });
    if (call.args[i].isDevice() && !device) device = call.args[i].toDevice();
  }
  if (device && device->has_index()) call.device = *device;
  for (const auto& returned : op.schema().returns()) {
    const auto* const alias = returned.alias_info();
    TORCH_CHECK(alias == nullptr || alias->isWrite(), "sim: ", call.name, " has no kernel");
  }
  return call;
}

/// Returns the arguments with each tensor of the device replaced by `f(tensor)`.
template <class F>
torch::jit::Stack args_with(const Call& call, at::Device device, const F& f) {
  torch::jit::Stack args;
  for (const IValue& arg : call.args) {
    if (arg.isDevice()) {
      args.emplace_back(device);
    } else if (arg.isGenerator()) {
      args.emplace_back(at::detail::createCPUGenerator());
    } else {
      args.push_back(map_tensors(
          arg, [&](const Tensor& each) { return is_on_device(each) ? f(each) : each; }));
    }
  }
  return args;
}

bool are_tensors(const Call& call, const std::vector<IValue>& results) {
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (call.is_new(i) && !results[i].isTensor() && !results[i].isTensorList()) return false;
  }
  return true;
}

/// The names of operators that do not work on the meta device, as far as this is known.
struct WithoutMeta {
  std::mutex mutex;
  std::unordered_set<std::string> names;
};

WithoutMeta& without_meta() {
  static auto* const without = new WithoutMeta;
  return *without;
}

/// Resizes the output arguments (`out=`, in-place) to the shapes that the operator gave to
/// `meta_args` on the meta device.
void resize_outputs(const Call& call, const std::vector<IValue>& meta_args) {
  for (std::size_t i = 0; i < call.args.size(); ++i) {
    if (!call.is_written(i) || !call.args[i].isTensor()) continue;
    const Tensor& output = call.args[i].toTensor();
    const auto sizes = meta_args[i].toTensor().sizes();
    if (output.sizes() != sizes) at::native::resize_output(output, sizes);
  }
}

/// Returns results with the right shapes, on the meta device. Returns nothing if the operator does
/// not work there.
std::optional<std::vector<IValue>> results_on_meta(const Call& call) {
  WithoutMeta& without = without_meta();
  {
    const std::lock_guard lock(without.mutex);
    if (without.names.contains(call.name)) return std::nullopt;
  }
  torch::jit::Stack stack = args_with(call, c10::kMeta, [](const Tensor& each) {
    return at::empty_strided(each.sizes(), each.strides(), each.options().device(c10::kMeta));
  });
  const std::vector<IValue> meta_args = stack;
  try {
    call.op.callBoxed(&stack);
    resize_outputs(call, meta_args);
    if (are_tensors(call, stack)) return stack;
  } catch (const c10::OutOfMemoryError&) {  // of `resize_outputs`
    throw;
  } catch (const c10::Error&) {
    // The meta device lacks the operator, or the arguments are wrong; then the CPU's kernel throws.
  }
  const std::lock_guard lock(without.mutex);
  without.names.insert(call.name);
  return std::nullopt;
}

bool has_shapes_by_values(const std::string& name) {
  static const std::unordered_set<std::string_view> names = {
      "aten::nonzero",  "aten::masked_select", "aten::_unique2",
      "aten::bincount", "aten::unique_dim",    "aten::repeat_interleave.Tensor",
      "aten::equal",    "aten::is_nonzero",    "aten::unique_consecutive"};
  return names.contains(name);
}

/// Returns results with the right shapes, computed on the CPU from zeros. Returns nothing if the
/// shapes depend on the values.
std::optional<std::vector<IValue>> results_of_zeros(const Call& call) {
  if (has_shapes_by_values(call.name)) return std::nullopt;
  torch::jit::Stack stack = args_with(call, c10::kCPU, [](const Tensor& each) {
    return at::empty_strided(each.sizes(), each.strides(), each.options().device(c10::kCPU))
        .zero_();
  });
  const std::vector<IValue> kept = stack;
  call.op.callBoxed(&stack);
  if (!are_tensors(call, stack)) return std::nullopt;
  return stack;
}

/// Returns the arguments for the CPU's kernel. `copies_scalars`: whether to copy CPU tensors, which
/// the caller may change before the kernel runs.
torch::jit::Stack kernel_args(const Call& call, bool copies_scalars) {
  torch::jit::Stack args;
  bool has_generator = false;
  for (std::size_t i = 0; i < call.args.size(); ++i) {
    const IValue& arg = call.args[i];
    if (call.op.schema().arguments()[i].name() == "generator") {
      has_generator = true;
      args.emplace_back(take_numbers(arg.isGenerator() ? arg.toGenerator()
                                                       : default_generator(call.device.index())));
    } else if (arg.isDevice()) {
      args.emplace_back(at::Device(c10::kCPU));
    } else {
      args.push_back(map_tensors(arg, [&](const Tensor& each) {
        if (is_on_device(each)) return in_kernel(each);
        return copies_scalars ? each.clone() : each;
      }));
    }
  }
  TORCH_CHECK(has_generator || !call.op.hasTag(at::Tag::nondeterministic_seeded),
              "sim: ", call.name, " draws random numbers, but has no kernel for this device");
  return args;
}

/// Runs the CPU's kernel and returns its results.
std::vector<IValue> run_kernel(const c10::OperatorHandle& op, torch::jit::Stack args) {
  // `callBoxed` of an operator with several outputs destroys the arguments while the outputs still
  // refer to them. `kept` keeps them alive.
  const std::vector<IValue> kept = args;
  op.callBoxed(&args);
  return args;
}

void copy_results(const std::vector<IValue>& to, const std::vector<IValue>& from) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    if (to[i].isTensor() && to[i].toTensor().defined()) {
      to[i].toTensor().copy_(from[i].toTensor());
    } else if (to[i].isTensorList()) {
      const auto targets = to[i].toTensorVector();
      const auto sources = from[i].toTensorVector();
      for (std::size_t k = 0; k < targets.size(); ++k) targets[k].copy_(sources[k]);
    }
  }
}

/// Launches the operator on the current stream. `shapes`: results with the right shapes.
std::vector<IValue> launch_operator(Call& call, const std::vector<IValue>& shapes) {
  std::vector<IValue> results, targets;
  for (std::size_t i = 0; i < call.num_results(); ++i) {
    if (!call.is_new(i)) {
      results.push_back(call.written_result(i));
      targets.emplace_back();
      continue;
    }
    results.push_back(map_tensors(shapes[i], [&](const Tensor& each) {
      Tensor made = at::empty_strided(each.sizes(), each.strides(),
                                      each.options().device(call.device).pinned_memory(false));
      call.writes.push_back(made);
      return made;
    }));
    targets.push_back(map_tensors(results.back(), [](const Tensor& t) { return in_kernel(t); }));
  }
  launch(current_stream(call.device.index()), call.name, call.reads, call.writes,
         [op = call.op, args = kernel_args(call, true), targets = std::move(targets)] {
           copy_results(targets, run_kernel(op, args));
         });
  return results;
}

/// Runs an operator whose result shapes depend on values. The host waits for it.
std::vector<IValue> await_operator(const Call& call) {
  report_waiting_operator(call.device.index(), call.name);
  const c10::Stream stream = current_stream(call.device.index());
  std::vector<IValue> on_host;
  launch(stream, call.name, call.reads, call.writes,
         [&, args = kernel_args(call, false)] { on_host = run_kernel(call.op, args); });
  synchronize_stream(stream);
  std::vector<IValue> results;
  for (std::size_t i = 0; i < call.num_results(); ++i) {
    results.push_back(
        call.is_new(i)
            ? map_tensors(on_host[i], [&](const Tensor& each) { return each.to(call.device); })
            : call.written_result(i));
  }
  return results;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call = describe(op, *stack);
  const c10::DeviceGuard on(call.device);
  std::optional<std::vector<IValue>> shapes;
  if (!call.has_new() && !call.name.ends_with("out")) {
    shapes.emplace();  // works in place, so shapes do not change
  } else {
    shapes = results_on_meta(call);
    if (!shapes && call.has_new()) shapes = results_of_zeros(call);
  }
  const std::vector<IValue> results =
      shapes ? launch_operator(call, *shapes) : await_operator(call);
  stack->erase(stack->end() - static_cast<std::ptrdiff_t>(call.args.size()), stack->end());
  stack->insert(stack->end(), results.begin(), results.end());
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace tessera::sim
