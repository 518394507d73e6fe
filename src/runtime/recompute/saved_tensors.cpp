#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/types.h>

#include <functional>
#include <map>
#include <mutex>

#include "runtime/recompute/autocast_state.h"
#include "runtime/recompute/recomputations.h"
#include "runtime/recompute/rng_states.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;

using MakeHooks = std::function<std::unique_ptr<SavedVariableHooks>()>;

/// Functions that make saved-tensor hooks, one for each open `recompute` of this thread, innermost
/// last.
thread_local std::vector<MakeHooks> hook_makers;

class HooksScope {
 public:
  explicit HooksScope(MakeHooks make) { hook_makers.push_back(std::move(make)); }
  ~HooksScope() { hook_makers.pop_back(); }
  HooksScope(const HooksScope&) = delete;
  HooksScope& operator=(const HooksScope&) = delete;
};

/// libtorch asks the autograd engine for the hooks of each saved tensor. In Python the engine
/// returns the hooks of torch.autograd.graph.saved_tensors_hooks; this engine returns `recompute`'s
/// hooks in C++.
class HookingEngine final : public Engine {
 public:
  static Engine& instance() {
    static auto* const engine = new HookingEngine;  // outlives every thread that uses it
    return *engine;
  }
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    return hook_makers.empty() ? nullptr : hook_makers.back()();
  }

 private:
  HookingEngine() = default;
};

/// True if the process uses this engine, false if it uses another one, such as Python's. The engine
/// is set when the library is loaded, before the first backward. A later change would have no
/// effect, because a process starts the threads of its engine only once.
const bool is_installed = [] {
  if (&Engine::get_default_engine() != &Engine::get_base_engine()) return false;
  torch::autograd::set_default_engine_stub(&HookingEngine::instance);
  return true;
}();

/// One call of `recompute`: everything that a second call of the function needs, and the tensors
/// that the second call has saved. The Notes in the autograd graph keep it alive.
class Frame : public std::enable_shared_from_this<Frame> {
 public:
  Frame(detail::RecomputeBody body, const std::vector<at::Tensor>& inputs, RngStates rng_states)
      : body_(std::move(body)), rng_states_(std::move(rng_states)) {
    for (const at::Tensor& input : inputs) inputs_.emplace_back(input, /*is_output=*/false);
  }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);
  std::size_t add_note(const at::Tensor& tensor) {
    sizes_.push_back(tensor.sizes().vec());
    return sizes_.size() - 1;
  }
  at::Tensor take(std::size_t index);

 private:
  void compute_again(std::vector<at::Tensor>& saved);

  std::mutex mutex_;
  detail::RecomputeBody body_;
  std::vector<SavedVariable> inputs_;
  RngStates rng_states_;
  AutocastState autocast_ = AutocastState::of_this_thread();
  std::vector<std::vector<std::int64_t>> sizes_;  // shapes of the tensors that the first call saved
  // For each backward: tensors that a second call saved and that autograd has not read yet.
  std::map<int, std::vector<at::Tensor>> saved_;
};

/// A placeholder in the autograd graph for a saved tensor. If autograd needs the tensor, the Note
/// calls the function again.
class Note final : public SavedVariableHooks {
 public:
  explicit Note(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
  void call_pack_hook(const at::Tensor& tensor) override { index_ = frame_->add_note(tensor); }
  at::Tensor call_unpack_hook() override { return frame_->take(index_); }

 private:
  std::shared_ptr<Frame> frame_;
  std::size_t index_ = 0;
};

/// Gives the Frame the tensors that the second call saves. The second call's graph is used only by
/// calls of `recompute` within the function.
class Collector final : public SavedVariableHooks {
 public:
  explicit Collector(std::vector<at::Tensor>& saved) : saved_(&saved) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    // Without `detach`, a saved output would keep its own node and this collector alive.
    tensor_ = tensor.detach();
    saved_->push_back(tensor_);
  }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  std::vector<at::Tensor>* saved_;
  at::Tensor tensor_;
};

std::vector<at::Tensor> Frame::run(const std::vector<at::Tensor>& inputs) {
  const HooksScope notes([frame = shared_from_this()] { return std::make_unique<Note>(frame); });
  return body_(inputs);
}

at::Tensor Frame::take(std::size_t index) {
  const std::lock_guard lock(mutex_);
  std::vector<at::Tensor>& saved = saved_[torch::autograd::get_current_graph_task_id()];
  if (saved.empty() || !saved[index].defined()) {
    saved.clear();
    compute_again(saved);
  }
  at::Tensor tensor = std::exchange(saved[index], at::Tensor());
  const bool is_all_taken =
      std::ranges::none_of(saved, [](const at::Tensor& each) { return each.defined(); });
  if (is_all_taken) saved_.erase(torch::autograd::get_current_graph_task_id());
  return tensor;
}

void Frame::compute_again(std::vector<at::Tensor>& saved) {
  std::vector<at::Tensor> inputs;
  for (const SavedVariable& each : inputs_) {
    const at::Tensor input = each.unpack();
    inputs.push_back(input.defined() ? input.detach().set_requires_grad(input.requires_grad())
                                     : input);
  }
  {
    const at::AutoGradMode grad(true);
    const RngScope rng(rng_states_);
    const AutocastScope autocast(autocast_);
    const HooksScope collect([&saved] { return std::make_unique<Collector>(saved); });
    body_(inputs);
  }
  const auto describe = [](const auto& sizes) {
    std::ostringstream text;
    text << at::IntArrayRef(sizes);
    return text.str();
  };
  if (saved.size() != sizes_.size()) {
    throw Error::expected(ErrorKind::mismatch, {}, "tensors that a recomputed function saves",
                          std::to_string(sizes_.size()) + " as in its forward",
                          std::to_string(saved.size()),
                          "does the function behave differently when called again?");
  }
  for (std::size_t i = 0; i < saved.size(); ++i) {
    if (saved[i].sizes() == at::IntArrayRef(sizes_[i])) continue;
    throw Error::expected(ErrorKind::mismatch, {},
                          "tensor " + std::to_string(i) + " that a recomputed function saves",
                          "shape " + describe(sizes_[i]) + " as in its forward",
                          describe(saved[i].sizes()),
                          "does the function behave differently when called again?");
  }
}

}  // namespace

std::vector<at::Tensor> recompute_saved_tensors(detail::RecomputeBody body,
                                                const std::vector<at::Tensor>& inputs,
                                                RngState rng_state) {
  if (!is_installed) {
    throw Error(ErrorKind::unsupported, {},
                "recompute: the process uses another autograd engine (Python's?); use "
                "Recomputation::reentrant, which works with it");
  }
  RngStates rng_states;
  if (rng_state == RngState::preserve) rng_states = RngStates::of_devices(inputs);
  const auto frame = std::make_shared<Frame>(std::move(body), inputs, std::move(rng_states));
  return frame->run(inputs);
}

}  // namespace tessera
