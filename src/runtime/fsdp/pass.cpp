#include "runtime/fsdp/pass.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/torch.h>

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::fsdp {
namespace {

using torch::nn::Module;

bool is_in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

dist::Group& group_of(const FlatParamHandle& handle) {
  const HandleOptions& options = handle.options();
  return handle.is_sharded() ? *options.shard_group : *options.replicate_group;
}

/// Numbers the units below a module in the order of the tree, and calls `visit` for each with the
/// numbers of the units inside it.
template <class Visit>
void number_units(const Module& module, const std::string& fqn, std::size_t& next,
                  const Visit& visit) {
  const auto sharded = registry::find<ShardedModule>(module);
  const std::size_t unit = next;
  if (sharded) ++next;
  for (const auto& child : module.named_children()) {
    number_units(*child.value(), fqn.empty() ? child.key() : fqn + "." + child.key(), next, visit);
  }
  if (sharded) visit(*sharded, fqn, unit, next);
}

}  // namespace

std::shared_ptr<Pass> Pass::of(Module& root) {
  if (auto pass = registry::find<Pass>(root)) return pass;
  auto pass = std::make_shared<Pass>(root);
  registry::attach(root, pass);
  return pass;
}

Pass::Pass(Module& root) {
  struct Found {
    std::shared_ptr<FlatParamHandle> handle;
    Place place;
  };
  std::vector<Found> found;
  std::size_t num_units = 0;
  number_units(
      root, "", num_units,
      [&](const ShardedModule& sharded, const std::string& fqn, std::size_t unit, std::size_t end) {
        for (const auto& handle : sharded.handles) {
          handle->join_root(fqn);
          found.push_back({handle, {unit, end}});
        }
      });
  if (found.empty()) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "forward of " + root.name(),
                          "a module with fully_shard applied to it or in it", "none");
  }
  std::ranges::stable_sort(found, {}, [](const Found& each) { return each.place.unit; });
  for (Found& each : found) {
    handles_.push_back(std::move(each.handle));
    places_.push_back(each.place);
  }
}

std::size_t Pass::index_of(const FlatParamHandle& handle) const {
  const auto it = std::ranges::find(handles_, &handle, [](const auto& each) { return each.get(); });
  TESSERA_CHECK(it != handles_.end());
  return static_cast<std::size_t>(it - handles_.begin());
}

// --- scopes

void Pass::enter_forward() {
  const std::lock_guard lock(mutex_);
  // A backward that ended with an exception never came to its end.
  if (is_open_ && is_end_queued_ && !is_in_backward()) abort();
  if (!is_open_) {
    open();
    records_gradients_ = false;
    order_.begin_pass(at::GradMode::is_enabled() ? OrderCheck::Kind::training
                                                 : OrderCheck::Kind::inference);
  }
  records_gradients_ = records_gradients_ || at::GradMode::is_enabled();
  ++forward_depth_;
}

void Pass::leave_forward(bool has_failed) {
  const std::lock_guard lock(mutex_);
  TESSERA_CHECK(forward_depth_ > 0);
  --forward_depth_;
  if (forward_depth_ > 0 || !is_open_) return;
  if (has_failed) return abort();
  if (!records_gradients_) close();
}

void Pass::enter_backward() {
  const std::lock_guard lock(mutex_);
  if (!is_open_) {
    open();
    order_.begin_pass(OrderCheck::Kind::training);
    records_gradients_ = true;
  }
  queue_end_of_backward();
}

void Pass::open() {
  const UntouchedScope untouched;
  std::size_t num_entered = 0;
  try {
    for (; num_entered < handles_.size(); ++num_entered) {
      handles_[num_entered]->enter_pass(shared_from_this());
    }
  } catch (...) {
    for (std::size_t i = 0; i < num_entered; ++i) handles_[i]->abort_pass();
    throw;
  }
  is_open_ = true;
  is_end_queued_ = false;
  last_touched_ = nullptr;
  gathered_.clear();
}

void Pass::close() {
  const UntouchedScope untouched;
  is_open_ = false;
  is_end_queued_ = false;
  last_touched_ = nullptr;
  gathered_.clear();
  order_.end_pass();
  std::exception_ptr first;
  for (const auto& handle : handles_) {
    try {
      handle->leave_pass();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

void Pass::abort() noexcept {
  const std::lock_guard lock(mutex_);
  if (!is_open_) return;
  is_open_ = false;
  is_end_queued_ = false;
  last_touched_ = nullptr;
  gathered_.clear();
  order_.abort_pass();
  const UntouchedScope untouched;
  for (const auto& handle : handles_) handle->abort_pass();
}

// --- what operators and the backward tell

void Pass::parameter_touched(FlatParamHandle& handle) {
  const std::lock_guard lock(mutex_);
  const bool is_backward = is_in_backward();
  if (is_backward) queue_end_of_backward();
  if (last_touched_ == &handle && handle.residence() == FlatParamHandle::Residence::unsharded) {
    return;
  }
  const UntouchedScope untouched;
  const std::size_t index = index_of(handle);
  leave_units_outside(index, is_backward);
  last_touched_ = &handle;
  if (handle.residence() == FlatParamHandle::Residence::sharded) {
    order_.announce("unshard " + handle.display_name(), group_of(handle));
    handle.start_unshard();
    gathered_.push_back(index);
  }
  handle.finish_unshard();
}

// [Note: Leaving]
void Pass::leave_units_outside(std::size_t handle, bool is_backward) {
  const std::size_t unit = places_[handle].unit;
  std::erase_if(gathered_, [&](std::size_t other) {
    const Place& place = places_[other];
    if (place.unit <= unit && unit < place.subtree_end) return false;
    if (!is_backward && !handles_[other]->reshards_after_forward()) return false;
    handles_[other]->reshard();
    return true;
  });
}

void Pass::gradient_ready(FlatParamHandle& handle, std::size_t index) {
  const std::lock_guard lock(mutex_);
  if (!is_open_) return;
  queue_end_of_backward();
  const UntouchedScope untouched;
  handle.take_gradient(index);
  if (handle.has_all_gradients() && gradients_ == Gradients::sync) reduce(handle);
}

void Pass::reduce(FlatParamHandle& handle) {
  finish_reduces();  // at most one whole gradient is on its way
  order_.announce("reduce " + handle.display_name(), group_of(handle));
  handle.start_reduce();
  handle.reshard();
  const std::size_t index = index_of(handle);
  std::erase(gathered_, index);
  if (last_touched_ == &handle) last_touched_ = nullptr;
}

void Pass::finish_reduces() {
  for (const auto& handle : handles_) handle->finish_reduce();
}

// The engine binds a callback to the graph task that runs now. Within recomputation that may be an
// inner one; what comes first in a backward is in the outer one.
void Pass::queue_end_of_backward() {
  if (std::exchange(is_end_queued_, true)) return;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [pass = shared_from_this()] { pass->end_backward(); });
}

void Pass::end_backward() {
  const std::lock_guard lock(mutex_);
  if (!is_open_) return;
  if (forward_depth_ > 0) {  // a backward inside a forward: its pass goes on
    is_end_queued_ = false;
    return;
  }
  const UntouchedScope untouched;
  try {
    for (const auto& handle : handles_) {
      if (gradients_ == Gradients::keep_unsharded) {
        handle->keep_unsharded_gradient();
      } else if (handle->has_gradients()) {
        reduce(*handle);
      }
    }
    finish_reduces();
  } catch (...) {
    abort();
    throw;
  }
  close();
}

}  // namespace tessera::fsdp
