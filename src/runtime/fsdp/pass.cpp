#include "runtime/fsdp/pass.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/types.h>

#include <algorithm>
#include <unordered_set>

#include "runtime/fsdp/traversal.h"
#include "tessera/base/error.h"

namespace tessera::fsdp {
namespace {

using torch::nn::Module;

bool is_in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

/// Returns the groups that the handle's gradients are averaged over.
std::vector<dist::Group*> groups_of(const FlatParamHandle& handle) {
  std::vector<dist::Group*> groups;
  for (const auto& group : {handle.options().shard_group, handle.options().replicate_group}) {
    if (group->size() > 1) groups.push_back(group.get());
  }
  return groups;
}

/// Returns what ranks are about to do with a handle.
OrderedEvent event_of(const std::string& verb, const FlatParamHandle& handle) {
  const FlatUnit& unit = handle.unit();
  return {verb + " " + handle.display_name(), std::string(dtype_name(unit.dtype)) + ", " +
                                                  std::to_string(unpadded_numel(unit)) +
                                                  " elements"};
}

/// Returns the groups of all handles, each once.
std::vector<dist::Group*> groups_of(const std::vector<std::shared_ptr<FlatParamHandle>>& handles) {
  std::vector<dist::Group*> groups;
  for (const auto& handle : handles) {
    for (dist::Group* const group : groups_of(*handle)) {
      if (std::ranges::find(groups, group) == groups.end()) groups.push_back(group);
    }
  }
  return groups;
}

/// Returns the device that all units compute on.
at::Device device_of(const std::vector<std::shared_ptr<FlatParamHandle>>& handles) {
  if (handles.empty()) return at::kCPU;
  const at::Device device = handles.front()->compute_device();
  for (const auto& handle : handles) {
    if (handle->compute_device() == device) continue;
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = handle->display_name()},
                          "units of one root", "all on " + device.str(),
                          "one on " + handle->compute_device().str());
  }
  return device;
}

void collect_members(const Module& module,
                     std::vector<std::shared_ptr<registry::PassMember>>& members) {
  auto member = registry::find<registry::PassMember>(module);
  // A module may stand in the tree twice.
  if (member && std::ranges::find(members, member) == members.end()) {
    members.push_back(std::move(member));
  }
  for (const auto& child : module.children()) collect_members(*child, members);
}

}  // namespace

std::shared_ptr<Pass> Pass::of(Module& root) {
  if (auto pass = registry::find<Pass>(root)) return pass;
  auto pass = std::make_shared<Pass>();
  pass->take_in(root);
  registry::attach(root, pass);
  return pass;
}

/// Makes what is in the tree of `root` its own. A pass that throws here dies, and leaves it free.
void Pass::take_in(Module& root) {
  root_ = registry::weak_module(root);
  const std::vector<UnitInTree> units = units_in_tree(root);
  collect_members(root, members_);
  if (units.empty() && members_.empty()) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "forward of " + root.name(),
                          "a module with fully_shard or replicate applied to it or in it", "none");
  }
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    ShardedModule& sharded = *units[unit].sharded;
    sharded.pass = weak_from_this();
    for (const auto& handle : sharded.handles) {
      handle->join_root(weak_from_this(), units[unit].fqn);
      handles_.push_back(handle);
      places_.push_back(
          {unit, units[unit].subtree_end, sharded.forward_prefetch, sharded.backward_prefetch});
    }
  }
  // The unit of the root itself says it, or else the first one does.
  if (!units.empty()) input_precision_ = units.front().sharded->mixed_precision;
  for (const auto& handle : handles_) {
    auto groups = groups_of(*handle);
    if (!groups.empty() && std::ranges::find(reduced_over_, groups) == reduced_over_.end()) {
      reduced_over_.push_back(std::move(groups));
    }
  }
  streams_ = std::make_shared<Streams>(device_of(handles_));
  const bool limits_all_gathers = std::ranges::any_of(
      units, [](const UnitInTree& unit) { return unit.sharded->limit_all_gathers; });
  if (limits_all_gathers && streams_->run_behind_host()) {
    rate_limiter_ = RateLimiter([streams = streams_] { return streams->record_event(); });
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
    open(at::GradMode::is_enabled() ? PassKind::training : PassKind::inference);
    records_gradients_ = false;
  }
  records_gradients_ = records_gradients_ || at::GradMode::is_enabled();
  if (forward_depth_ == 0) {
    for (const auto& member : members_) member->begin_forward();
  }
  ++forward_depth_;
}

/// Dies with a graph.
class Pass::GraphToken {
 public:
  GraphToken(std::weak_ptr<Pass> pass, std::uint64_t number)
      : pass_(std::move(pass)), number_(number) {}
  ~GraphToken() {
    if (const auto pass = pass_.lock()) pass->graph_died(number_);
  }
  GraphToken(const GraphToken&) = delete;
  GraphToken& operator=(const GraphToken&) = delete;

 private:
  std::weak_ptr<Pass> pass_;
  std::uint64_t number_;
};

std::shared_ptr<void> Pass::graph_token() {
  const std::lock_guard lock(mutex_);
  ++num_graphs_;
  return std::make_shared<GraphToken>(weak_from_this(), number_);
}

void Pass::graph_died(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  if (number != number_ || !is_open_ || --num_graphs_ > 0) return;
  if (forward_depth_ == 0 && !has_unwatched_graph_ && !is_end_queued_) abort();
}

void Pass::leave_forward(bool has_failed, bool is_watched) {
  const std::lock_guard lock(mutex_);
  TESSERA_CHECK(forward_depth_ > 0);
  --forward_depth_;
  if (forward_depth_ > 0 || !is_open_) return;
  if (has_failed) return abort();
  has_unwatched_graph_ = has_unwatched_graph_ || !is_watched;
  if (!records_gradients_ || has_had_backward_) close();
}

void Pass::enter_backward() {
  const std::lock_guard lock(mutex_);
  if (!is_open_) {
    open(PassKind::training);
    records_gradients_ = true;
  }
  queue_end_of_backward();
}

Pass::Gradients Pass::set_gradients(Gradients gradients) {
  const std::lock_guard lock(mutex_);
  const Gradients before = std::exchange(gradients_, gradients);
  for (const auto& member : members_) {
    member->set_gradient_sync(gradients == Gradients::sync ? registry::GradientSync::on
                                                           : registry::GradientSync::off);
  }
  return before;
}

/// Throws where a module with parameters of units was replaced by another. Those of the optimizer
/// would go on as they are, unused.
void Pass::check_tree() const {
  const ModulePtr root = root_.lock();
  if (!root) return;  // in its destructor
  std::unordered_set<const at::TensorImpl*> in_tree;
  for_each_parameter(
      *root, [&](const at::Tensor& parameter) { in_tree.insert(parameter.unsafeGetTensorImpl()); });
  for (const auto& handle : handles_) handle->check_tree(in_tree);
}

void Pass::open(PassKind kind) {
  const UntouchedScope untouched;
  check_tree();
  is_tracing_ = forward_order_.empty();
  is_visited_.clear();
  for (const auto& handle : handles_) {
    if (is_tracing_) is_visited_.emplace_back(handle->unit().parameters.size());
  }
  std::size_t num_entered = 0;
  try {
    for (; num_entered < handles_.size(); ++num_entered) {
      handles_[num_entered]->enter_pass(
          shared_from_this(), streams_,
          is_tracing_ ? FlatParamHandle::Tracing::on : FlatParamHandle::Tracing::off);
    }
  } catch (...) {
    for (std::size_t i = 0; i < num_entered; ++i) handles_[i]->abort_pass();
    throw;
  }
  // Gathers read what the optimizer's step wrote.
  streams_->make_wait(streams_->unshard, streams_->compute());
  streams_->make_wait(streams_->pre_unshard, streams_->compute());
  is_open_ = true;
  ++number_;
  num_graphs_ = 0;
  has_unwatched_graph_ = false;
  is_end_queued_ = has_had_backward_ = false;
  last_touched_ = nullptr;
  gathered_.clear();
  order_.begin_pass(kind);
  execution_order_.begin_pass(kind);
}

void Pass::close() {
  const UntouchedScope untouched;
  try {
    order_.end_pass(groups_of(handles_));
  } catch (...) {
    abort();
    throw;
  }
  is_open_ = false;
  is_end_queued_ = false;
  last_touched_ = nullptr;
  gathered_.clear();
  execution_order_.end_pass();
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
  execution_order_.abort_pass();
  const UntouchedScope untouched;
  for (const auto& handle : handles_) handle->abort_pass();
}

// --- what operators and the backward tell

void Pass::parameter_touched(FlatParamHandle& handle, std::size_t index) {
  const std::lock_guard lock(mutex_);
  const bool is_backward = is_in_backward();
  if (is_backward) queue_end_of_backward();
  if (is_tracing_ && !is_backward) record_use(index_of(handle), index);
  if (last_touched_ == &handle && handle.residence() == FlatParamHandle::Residence::unsharded) {
    operator_of_last_touch_ = current_operator();
    return;
  }
  const UntouchedScope untouched;
  const std::size_t position = index_of(handle);
  for (Gathered& each : gathered_) {
    if (handles_[each.handle].get() == last_touched_) each.last_operator = operator_of_last_touch_;
  }
  leave_units_outside(position, is_backward);
  last_touched_ = &handle;
  operator_of_last_touch_ = current_operator();
  auto it = std::ranges::find(gathered_, position, &Gathered::handle);
  const LastUse use = is_backward ? LastUse::backward : LastUse::forward;
  if (it != gathered_.end() && it->last_use == use) return handle.finish_unshard();
  const auto phase = is_backward ? ExecutionOrder::Phase::backward : ExecutionOrder::Phase::forward;
  const auto course = execution_order_.note({position, phase});
  if (it == gathered_.end()) {
    gather(position, use);
  } else {
    it->last_use = use;
  }
  if (course == ExecutionOrder::Course::deviating) free_unused();
  const Place& place = places_[position];
  if (is_backward ? place.backward_prefetch == BackwardPrefetch::backward_pre
                  : place.forward_prefetch == ForwardPrefetch::next) {
    gather_next(phase);
  }
  handle.finish_unshard();
}

void Pass::record_use(std::size_t handle, std::size_t parameter) {
  if (is_visited_[handle][parameter]) return;
  is_visited_[handle][parameter] = true;
  forward_order_.push_back({handle, parameter});
}

// [Note: Leaving]
void Pass::leave_units_outside(std::size_t handle, bool is_backward) {
  const std::size_t unit = places_[handle].unit;
  for (std::size_t i = gathered_.size(); i-- > 0;) {
    const auto [other, last_use, last_operator] = gathered_[i];
    const Place& place = places_[other];
    if (place.unit <= unit && unit < place.subtree_end) continue;
    if (last_operator == current_operator()) continue;
    if (is_backward ? last_use == LastUse::backward
                    : last_use == LastUse::forward && handles_[other]->reshards_after_forward()) {
      free(other);
    }
  }
}

void Pass::gather(std::size_t handle, LastUse last_use) {
  FlatParamHandle& gathered = *handles_[handle];
  if (gathered.residence() == FlatParamHandle::Residence::sharded &&
      gathered.has_own_full_buffer()) {
    order_.announce(event_of("unshard", gathered), {gathered.options().shard_group.get()});
    gathered.prepare_unshard();
    rate_limiter_.wait_for_room();
    gathered.start_unshard();
  }
  gathered_.push_back({handle, last_use});
}

void Pass::free(std::size_t handle) {
  handles_[handle]->reshard();
  if (handles_[handle]->has_own_full_buffer()) rate_limiter_.note_freed();
  std::erase_if(gathered_, [&](const Gathered& each) { return each.handle == handle; });
  if (last_touched_ == handles_[handle].get()) last_touched_ = nullptr;
}

void Pass::gather_next(ExecutionOrder::Phase phase) {
  const auto next = execution_order_.next();
  if (!next || next->phase != phase) return;
  if (std::ranges::find(gathered_, next->handle, &Gathered::handle) != gathered_.end()) return;
  gather(next->handle, LastUse::none);
}

void Pass::free_unused() {
  for (std::size_t i = gathered_.size(); i-- > 0;) {
    if (gathered_[i].last_use == LastUse::none) free(gathered_[i].handle);
  }
}

void Pass::gradient_ready(FlatParamHandle& handle, std::size_t index) {
  const std::lock_guard lock(mutex_);
  if (!is_open_) return;
  queue_end_of_backward();
  if (!handle.reduces_gradients()) return;
  const UntouchedScope untouched;
  handle.take_gradient(index);
  if (handle.has_all_gradients() && gradients_ == Gradients::sync) reduce(handle);
}

void Pass::reduce(FlatParamHandle& handle) {
  finish_reduces();  // at most one whole gradient is on its way
  order_.announce(event_of("reduce", handle), groups_of(handle));
  handle.start_reduce();
  const std::size_t position = index_of(handle);
  free(position);
  if (places_[position].backward_prefetch == BackwardPrefetch::backward_post) {
    gather_next(ExecutionOrder::Phase::backward);
  }
}

void Pass::finish_reduces() {
  for (const auto& handle : handles_) handle->finish_reduce();
}

// The engine binds a callback to the graph task that runs now. Within recomputation that may be an
// inner one; what comes first in a backward is in the outer one.
void Pass::queue_end_of_backward() {
  if (is_end_queued_ && end_of_backward_.is_queued()) return;
  if (is_end_queued_) {
    // The backward before this one failed: what it left is no gradient.
    abort();
    open(PassKind::training);
  }
  end_of_backward_.queue([pass = shared_from_this()] { pass->end_backward(); });
  is_end_queued_ = true;
}

void Pass::gradient_comes() {
  const std::lock_guard lock(mutex_);
  if (is_open_) queue_end_of_backward();
}

/// A rank that has not used a parameter holds a part of its gradient all the same, where others
/// have.
void Pass::share_what_was_reduced() {
  for (const auto& groups : reduced_over_) {
    std::vector<int> counts;
    for (const auto& handle : handles_) {
      if (groups_of(*handle) != groups) continue;
      for (const bool gave : handle->gave_gradients()) counts.push_back(gave ? 1 : 0);
    }
    at::Tensor sum = torch::tensor(counts, at::kInt).to(groups.front()->device());
    for (dist::Group* const group : groups)
      group->all_reduce(sum, "which gradients there are").wait();
    // Only who lacks one waits for the device.
    if (std::ranges::find(counts, 0) == counts.end()) continue;
    sum = sum.to(at::kCPU);
    const int* next = sum.data_ptr<int>();
    for (const auto& handle : handles_) {
      if (groups_of(*handle) != groups) continue;
      std::vector<bool> any_gave(handle->unit().parameters.size());
      for (std::size_t i = 0; i < any_gave.size(); ++i) any_gave[i] = *next++ > 0;
      handle->set_reduced(any_gave);
    }
  }
}

void Pass::end_backward() {
  const std::lock_guard lock(mutex_);
  if (!is_open_) return;
  const UntouchedScope untouched;
  try {
    for (const auto& handle : handles_) {
      if (gradients_ == Gradients::keep_unsharded) {
        handle->keep_unsharded_gradient();
      } else if (handle->has_gradients() || handle->has_unsynced_gradients()) {
        reduce(*handle);
      }
    }
    if (gradients_ == Gradients::sync) share_what_was_reduced();
    finish_reduces();
  } catch (...) {
    abort();
    throw;
  }
  if (forward_depth_ == 0) return close();
  is_end_queued_ = false;  // a backward inside a forward: its pass goes on until that is left
  has_had_backward_ = true;
}

}  // namespace tessera::fsdp
