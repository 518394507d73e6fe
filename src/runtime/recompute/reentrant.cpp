#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/types.h>

#include "runtime/autograd_node.h"
#include "runtime/recompute/autocast_state.h"
#include "runtime/recompute/recomputations.h"
#include "runtime/recompute/rng_states.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// The autograd node of a whole recomputed function. Its last input is an empty tensor that
/// requires a gradient. So the node is in the graph even if none of the function's inputs requires
/// a gradient, but only its parameters do.
class ReentrantRecomputeBackward final : public torch::autograd::Node {
 public:
  ReentrantRecomputeBackward(detail::RecomputeBody body, const variable_list& inputs,
                             RngStates rng_states)
      : body_(std::move(body)), rng_states_(std::move(rng_states)) {
    for (const at::Tensor& input : inputs) inputs_.emplace_back(input, /*is_output=*/false);
  }

  std::string name() const override { return "tessera::ReentrantRecomputeBackward"; }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (SavedVariable& input : inputs_) input.reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard lock(mutex_);
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
      throw Error(ErrorKind::unsupported, {},
                  "reentrant recompute: torch::autograd::grad does not get all gradients; use "
                  "Recomputation::saved_tensors, or call loss.backward()");
    }
    variable_list inputs;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      const at::Tensor input = inputs_[i].unpack();
      inputs.push_back(input.defined() ? input.detach().set_requires_grad(input.requires_grad())
                                       : input);
    }
    variable_list outputs;
    {
      const at::AutoGradMode grad(true);
      const RngScope rng(rng_states_);
      const AutocastScope autocast(autocast_);
      outputs = body_(inputs);
    }
    variable_list roots;
    variable_list root_gradients;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].defined() || !outputs[i].requires_grad() || !gradients[i].defined()) continue;
      roots.push_back(outputs[i]);
      root_gradients.push_back(gradients[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
    variable_list input_gradients;
    for (const at::Tensor& input : inputs) {
      input_gradients.push_back(input.defined() ? input.grad() : at::Tensor());
    }
    input_gradients.emplace_back();
    return input_gradients;
  }

 private:
  detail::RecomputeBody body_;
  std::vector<SavedVariable> inputs_;
  RngStates rng_states_;
  AutocastState autocast_ = AutocastState::of_this_thread();
};

}  // namespace

std::vector<at::Tensor> recompute_reentrant(detail::RecomputeBody body,
                                            const std::vector<at::Tensor>& inputs,
                                            RngState rng_state) {
  RngStates rng_states;
  if (rng_state == RngState::preserve) rng_states = RngStates::of_devices(inputs);
  std::vector<at::Tensor> outputs;
  {
    const at::NoGradGuard no_grad;
    outputs = body(inputs);
  }
  const auto node =
      make_node<ReentrantRecomputeBackward>(std::move(body), inputs, std::move(rng_states));
  const at::Tensor requires_grad = torch::empty({0}, torch::requires_grad());
  torch::autograd::edge_list edges;
  for (const at::Tensor& input : inputs) {
    edges.push_back(input.defined() ? torch::autograd::impl::gradient_edge(input)
                                    : torch::autograd::Edge());
  }
  edges.push_back(torch::autograd::impl::gradient_edge(requires_grad));
  node->set_next_edges(std::move(edges));
  for (at::Tensor& output : outputs) {
    if (!output.defined()) {
      node->add_input_metadata(torch::autograd::Node::undefined_input());
      continue;
    }
    output = output.detach();  // because it may be an input or a view of an input
    if (output.is_floating_point() || output.is_complex()) {
      torch::autograd::set_history(output, node);
    } else {
      node->add_input_metadata(torch::autograd::Node::undefined_input());
    }
  }
  return outputs;
}

}  // namespace tessera
