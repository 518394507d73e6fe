#include "tessera/runtime/optim/fused_step.h"

#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/base/error.h"

namespace tessera {
namespace {

namespace optim = torch::optim;

/// What one call of a fused kernel updates: parameters of one group, device and dtype.
struct KernelLists {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;
  std::vector<std::vector<at::Tensor>> slots;  // in the order of the rule's `slots`
  std::vector<at::Tensor> steps;               // with this step: 1 in the first
};

// --- Rules: state of each optimizer, and its kernel. `slots` are the tensors that a step needs.

template <class OptimizerOptions, class ParamState, bool kIsAdamW>
struct AdamRule {
  using Options = OptimizerOptions;
  using State = ParamState;
  static constexpr bool kUsesCudaKernel = true;
  static constexpr bool kCpuKernelTakesHalf = true;
  static constexpr bool kStepMakesState = true;
  static constexpr bool kAutogradSeesStep = true;

  static bool has_state(const Options& /*options*/) { return true; }
  static std::vector<at::Tensor*> slots(State& state, const Options& options) {
    std::vector<at::Tensor*> slots = {&state.exp_avg(), &state.exp_avg_sq()};
    if (options.amsgrad()) slots.push_back(&state.max_exp_avg_sq());
    return slots;
  }
  static std::int64_t* step(State& state) { return &state.step(); }
  static void run(const Options& options, const KernelLists& lists, bool /*is_first*/) {
    const auto [beta1, beta2] = options.betas();
    const auto kernel = [&](auto&& function) {
      function(lists.parameters, lists.gradients, lists.slots[0], lists.slots[1],
               options.amsgrad() ? at::TensorList(lists.slots[2]) : at::TensorList(), lists.steps,
               options.lr(), beta1, beta2, options.weight_decay(), options.eps(), options.amsgrad(),
               /*maximize=*/false);
    };
    if constexpr (kIsAdamW) {
      kernel([](auto&&... arguments) { at::_fused_adamw_(arguments...); });
    } else {
      kernel([](auto&&... arguments) { at::_fused_adam_(arguments...); });
    }
  }
};

struct SgdRule {
  using Options = optim::SGDOptions;
  using State = optim::SGDParamState;
  static constexpr bool kUsesCudaKernel = true;
  // It does not update most elements: github.com/pytorch/pytorch, issue 191763.
  static constexpr bool kCpuKernelTakesHalf = false;
  static constexpr bool kStepMakesState = true;
  static constexpr bool kAutogradSeesStep = false;  // it writes to `.data()`

  static bool has_state(const Options& options) { return options.momentum() != 0; }
  static std::vector<at::Tensor*> slots(State& state, const Options& /*options*/) {
    return {&state.momentum_buffer()};
  }
  static std::int64_t* step(State& /*state*/) { return nullptr; }
  static void run(const Options& options, const KernelLists& lists, bool is_first) {
    at::_fused_sgd_(lists.parameters, lists.gradients,
                    has_state(options) ? at::TensorList(lists.slots[0]) : at::TensorList(),
                    options.weight_decay(), options.momentum(), options.lr(), options.dampening(),
                    options.nesterov(), /*maximize=*/false, is_first);
  }
};

struct AdagradRule {
  using Options = optim::AdagradOptions;
  using State = optim::AdagradParamState;
  static constexpr bool kUsesCudaKernel = false;  // nor does Python in PyTorch 2.11
  static constexpr bool kCpuKernelTakesHalf = true;
  static constexpr bool kStepMakesState = false;  // its constructor does
  static constexpr bool kAutogradSeesStep = true;

  static bool has_state(const Options& /*options*/) { return true; }
  static std::vector<at::Tensor*> slots(State& state, const Options& /*options*/) {
    return {&state.sum()};
  }
  static std::int64_t* step(State& state) { return &state.step(); }
  static void run(const Options& options, const KernelLists& lists, bool /*is_first*/) {
    at::_fused_adagrad_(lists.parameters, lists.gradients, lists.slots[0], lists.steps,
                        options.lr(), options.lr_decay(), options.weight_decay(), options.eps(),
                        /*maximize=*/false);
  }
};

// --- which parameters a kernel takes

bool is_half(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
}

template <class Rule>
bool has_kernel(const at::Tensor& parameter) {
  const at::ScalarType dtype = parameter.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble && !is_half(dtype)) return false;
  if (!parameter.is_cpu() && !(parameter.is_cuda() && Rule::kUsesCudaKernel)) return false;
  if (parameter.is_cpu() && is_half(dtype) && !Rule::kCpuKernelTakesHalf) return false;
  return parameter.layout() == at::kStrided && parameter.is_non_overlapping_and_dense();
}

/// Returns whether the elements of two tensors of equal sizes lie in the same order in memory.
bool are_in_same_order(const at::Tensor& a, const at::Tensor& b) {
  for (std::int64_t dim = 0; dim < a.dim(); ++dim) {
    if (a.size(dim) != 1 && a.stride(dim) != b.stride(dim)) return false;
  }
  return true;
}

/// Returns whether a kernel can take `tensor` as the gradient or state of `parameter`. Those of the
/// CPU read elements in the order of memory, and check nothing.
bool fits(const at::Tensor& tensor, const at::Tensor& parameter) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_neg() &&
         tensor.device() == parameter.device() && tensor.scalar_type() == parameter.scalar_type() &&
         tensor.sizes() == parameter.sizes() && are_in_same_order(tensor, parameter);
}

/// Throws if a step would update a parameter twice.
void refuse_repeated_parameters(const optim::Optimizer& optimizer) {
  const auto name = [](std::size_t group, std::size_t number) {
    return "parameter " + std::to_string(number) + " of group " + std::to_string(group);
  };
  std::unordered_map<const c10::TensorImpl*, std::pair<std::size_t, std::size_t>> seen;
  for (std::size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    const std::vector<at::Tensor>& parameters = optimizer.param_groups()[group].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto [first, is_new] = seen.try_emplace(parameters[i].unsafeGetTensorImpl(), group, i);
      if (is_new) continue;
      throw Error::expected(
          ErrorKind::invalid_argument, {}, "optimizer of fused_step", "each parameter once",
          name(group, i) + ", which is also " + name(first->second.first, first->second.second),
          "Module::parameters() lists a tied weight once for each of its names; "
          "tessera::parameters(model) lists it once");
    }
  }
}

/// Lets the optimizer's own step update these parameters (a list for each group) and no other ones.
void own_step(optim::Optimizer& optimizer, std::vector<std::vector<at::Tensor>> parameters) {
  const auto swap_parameters = [&] {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      optimizer.param_groups()[i].params().swap(parameters[i]);
    }
  };
  swap_parameters();
  try {
    optimizer.step();
  } catch (...) {
    swap_parameters();
    throw;
  }
  swap_parameters();
}

// --- a step

template <class Rule>
class FusedStep {
 public:
  explicit FusedStep(optim::Optimizer& optimizer) : optimizer_(optimizer) {}

  void run() {
    std::vector<std::vector<at::Tensor>> own(optimizer_.param_groups().size());
    for (std::size_t i = 0; i < own.size(); ++i) {
      for (const at::Tensor& parameter : optimizer_.param_groups()[i].params()) {
        if (!parameter.grad().defined()) continue;
        if (!add(i, parameter)) own[i].push_back(parameter);
      }
    }
    // First, because it may refuse a gradient: then no other parameter has been updated.
    if (std::ranges::any_of(own, [](const auto& each) { return !each.empty(); })) {
      own_step(optimizer_, std::move(own));
    }
    for (auto& [key, members] : batches_) {
      const auto& [group, device, dtype, is_first] = key;
      update(options_of(group), members, is_first);
    }
  }

 private:
  using State = typename Rule::State;
  using Options = typename Rule::Options;

  /// A group's number, device index (the CPU's: -1), dtype, and whether its parameters have no
  /// state.
  using Key = std::tuple<std::size_t, int, at::ScalarType, bool>;

  struct Member {
    at::Tensor parameter;
    State* state = nullptr;  // null if the parameter has none
  };

  Options& options_of(std::size_t group) {
    return static_cast<Options&>(optimizer_.param_groups()[group].options());
  }

  /// Adds a parameter to a batch. Returns false if no fused kernel can update it.
  bool add(std::size_t group, const at::Tensor& parameter) {
    if (!has_kernel<Rule>(parameter) || !fits(parameter.grad(), parameter)) {
      return false;
    }
    const Options& options = options_of(group);
    State* state = nullptr;
    if (Rule::has_state(options)) {
      const auto found = optimizer_.state().find(parameter.unsafeGetTensorImpl());
      if (found != optimizer_.state().end()) {
        state = static_cast<State*>(found->second.get());
        for (const at::Tensor* slot : Rule::slots(*state, options)) {
          if (!fits(*slot, parameter)) return false;
        }
      } else if (!Rule::kStepMakesState) {
        return false;
      }
    }
    const Key key{group, parameter.is_cpu() ? -1 : parameter.device().index(),
                  parameter.scalar_type(), state == nullptr};
    batches_[key].push_back({parameter, state});
    return true;
  }

  /// Updates parameters of one batch. New state gets into the optimizer after its first update, so
  /// that a kernel that fails leaves no state with zeros in it.
  void update(const Options& options, const std::vector<Member>& members, bool is_first) {
    std::vector<std::unique_ptr<State>> new_states;
    std::map<std::int64_t, at::Tensor> step_tensors;
    KernelLists lists;
    std::vector<std::int64_t*> counters;
    for (const Member& member : members) {
      const at::Tensor& parameter = member.parameter;
      lists.parameters.push_back(parameter);
      lists.gradients.push_back(parameter.grad());
      if (!Rule::has_state(options)) continue;
      State* state = member.state;
      if (is_first) {
        state = new_states.emplace_back(std::make_unique<State>()).get();
        for (at::Tensor* slot : Rule::slots(*state, options)) *slot = torch::zeros_like(parameter);
      }
      const auto slots = Rule::slots(*state, options);
      lists.slots.resize(slots.size());
      for (std::size_t i = 0; i < slots.size(); ++i) lists.slots[i].push_back(*slots[i]);
      std::int64_t* const counter = Rule::step(*state);
      if (counter == nullptr) continue;
      counters.push_back(counter);
      // Parameters of equal steps share the tensor, because kernels only read it. They take
      // float32, as Python's optimizers store it.
      at::Tensor& step = step_tensors[*counter + 1];
      if (!step.defined()) {
        step = torch::full({}, *counter + 1, parameter.options().dtype(at::kFloat));
      }
      lists.steps.push_back(step);
    }
    Rule::run(options, lists, is_first && Rule::has_state(options));
    if (Rule::kAutogradSeesStep) {
      // Kernels do not tell autograd. A backward that still needs the old values must be refused.
      for (const at::Tensor& each : lists.parameters) each.unsafeGetTensorImpl()->bump_version();
    }
    for (std::int64_t* const counter : counters) ++*counter;
    for (std::size_t i = 0; i < new_states.size(); ++i) {
      optimizer_.state()[members[i].parameter.unsafeGetTensorImpl()] = std::move(new_states[i]);
    }
  }

  optim::Optimizer& optimizer_;
  std::map<Key, std::vector<Member>> batches_;
};

/// Steps the optimizer if it is of the class `Optimizer` itself. A derived class may do more in its
/// step.
template <class Optimizer, class Rule>
bool step_as(optim::Optimizer& optimizer) {
  if (typeid(optimizer) != typeid(Optimizer)) return false;
  refuse_repeated_parameters(optimizer);
  FusedStep<Rule>(optimizer).run();
  return true;
}

template <class... Optimizers>
bool is_derived_from(const optim::Optimizer& optimizer) {
  return ((dynamic_cast<const Optimizers*>(&optimizer) != nullptr) || ...);
}

}  // namespace

void fused_step(optim::Optimizer& optimizer) {
  using Adam = AdamRule<optim::AdamOptions, optim::AdamParamState, false>;
  using AdamW = AdamRule<optim::AdamWOptions, optim::AdamWParamState, true>;
  const at::NoGradGuard no_grad;
  if (step_as<optim::SGD, SgdRule>(optimizer) || step_as<optim::Adam, Adam>(optimizer) ||
      step_as<optim::AdamW, AdamW>(optimizer) || step_as<optim::Adagrad, AdagradRule>(optimizer)) {
    return;
  }
  const std::string name = c10::demangle(typeid(optimizer).name());
  const bool is_derived =
      is_derived_from<optim::SGD, optim::Adam, optim::AdamW, optim::Adagrad>(optimizer);
  throw Error::expected(ErrorKind::unsupported, {}, "optimizer of fused_step",
                        "SGD, Adam, AdamW or Adagrad of torch::optim",
                        is_derived ? name + ", a class derived from one of them" : name,
                        "call its step() instead");
}

}  // namespace tessera
