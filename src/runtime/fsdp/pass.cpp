#include "runtime/fsdp/pass.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/types.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "runtime/fsdp/traversal.h"
#include "tessera/base/error.h"

namespace tessera::fsdp {
namespace {

using torch::nn::Module;

bool is_in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

/// Returns a text about a unit that must be equal on all ranks, because they gather and reduce the
/// unit together.
std::string description_of(const FlatParamHandle& handle) {
  const FlatUnit& unit = handle.unit();
  return handle.display_name() + " (" + std::string(dtype_name(unit.dtype)) + ", " +
         std::to_string(unpadded_numel(unit)) + " elements)";
}

/// Returns the largest group of ranks that share a unit; nullptr if each unit has one rank only.
std::shared_ptr<dist::Group> group_of_all(
    const std::vector<std::shared_ptr<FlatParamHandle>>& handles) {
  std::shared_ptr<dist::Group> largest;
  for (const auto& handle : handles) {
    const auto& group = handle->options().world_group;
    if (group->size() > (largest ? largest->size() : 1)) largest = group;
  }
  return largest;
}

/// Records that `pass` opens a phase on the ranks of `group`. Returns the pass that opened the
/// phase before; nullptr for the first phase. See [Note: Turns].
std::shared_ptr<Pass> take_turn(const dist::Group* group, const std::shared_ptr<Pass>& pass) {
  static std::mutex mutex;
  // A pass owns its group, so a group's address is not used again while its last pass lives.
  static std::unordered_map<const dist::Group*, std::weak_ptr<Pass>> last_passes;
  const std::lock_guard lock(mutex);
  std::erase_if(last_passes, [](const auto& each) { return each.second.expired(); });
  return std::exchange(last_passes[group], pass).lock();
}

/// Returns the device on which all units compute.
at::Device device_of(const std::vector<std::shared_ptr<FlatParamHandle>>& handles) {
  if (handles.empty()) return at::kCPU;
  const at::Device device = handles.front()->storage().compute_device();
  for (const auto& handle : handles) {
    if (handle->storage().compute_device() == device) continue;
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = handle->display_name()},
                          "device of the units in one model", "the same device, " + device.str(),
                          handle->storage().compute_device().str());
  }
  return device;
}

}  // namespace

std::shared_ptr<Pass> Pass::of(Module& root) {
  if (auto pass = registry::find<Pass>(root)) return pass;
  auto pass = std::make_shared<Pass>();
  pass->take_in(root);
  registry::attach(root, pass);
  return pass;
}

/// Takes over the units in the tree of `root`. If this throws, the pass is destroyed, which
/// releases the units.
void Pass::take_in(Module& root) {
  root_ = registry::weak_module(root);
  const std::vector<UnitInTree> units = units_in_tree(root);
  find_members(root);
  if (units.empty() && members_.empty()) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "forward of " + root.name(),
                          "fully_shard or replicate, applied to it or to a module inside it",
                          "neither");
  }
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    const ShardedModule& sharded = *units[unit].sharded;
    for (const auto& handle : sharded.handles) {
      handle->join_root(weak_from_this(), units[unit].fqn);
      handles_.push_back(handle);
      places_.push_back(
          {unit, units[unit].subtree_end, {sharded.forward_prefetch, sharded.backward_prefetch}});
    }
  }
  // Only now, because a unit that belongs to another root has thrown above.
  for (const UnitInTree& unit : units) unit.sharded->pass = weak_from_this();
  // Inputs of the root are cast by the settings of the root's unit; if the root is not a unit, by
  // the settings of the first unit.
  if (!units.empty()) input_precision_ = units.front().sharded->mixed_precision;
  group_ = group_of_all(handles_);
  std::vector<PrefetchRule> rules;
  for (const Place& place : places_) rules.push_back(place.prefetch);
  std::vector<std::string> descriptions;
  for (const auto& handle : handles_) descriptions.push_back(description_of(*handle));
  if (!units.empty()) collect_meetings(root, "");
  for (const Meeting& meeting : meetings_) {
    rules.emplace_back();
    descriptions.push_back(meeting.fqn + " (with its own collectives)");
  }
  runner_ = std::make_unique<CollectiveRunner>(group_, std::move(rules), std::move(descriptions),
                                               static_cast<CollectiveActions&>(*this));
  streams_ = std::make_shared<Streams>(device_of(handles_));
  const bool limits_all_gathers = std::ranges::any_of(
      units, [](const UnitInTree& unit) { return unit.sharded->limit_all_gathers; });
  if (limits_all_gathers && streams_->run_behind_host()) {
    rate_limiter_ = RateLimiter([streams = streams_] { return streams->record_event(); });
  }
}

bool Pass::meets_at(const registry::MeetingPoint& point) const {
  return std::ranges::any_of(meetings_,
                             [&](const Meeting& each) { return each.point.get() == &point; });
}

/// Adds replicated modules and the like (PassMember) that are new in the tree: `replicate` may be
/// called after the first forward.
void Pass::find_members(const Module& module) {
  auto member = registry::find<registry::PassMember>(module);
  // Adds it once, because a module may be in the tree twice.
  if (member && std::ranges::find(members_, member) == members_.end()) {
    if (gradients_ == Gradients::keep_unsharded) member->set_gradient_sync(gradient_sync());
    members_.push_back(std::move(member));
  }
  for (const auto& child : module.children()) find_members(*child);
}

registry::GradientSync Pass::gradient_sync() const {
  return gradients_ == Gradients::sync ? registry::GradientSync::on : registry::GradientSync::off;
}

void Pass::drop_unsynced_gradients() {
  const std::lock_guard lock(mutex_);
  if (forward_depth_ > 0 || end_of_backward_.is_queued()) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "drop_unsynced_gradients",
                          "a call outside of forward and backward", "a call during one of them");
  }
  for (const auto& handle : handles_) handle->gradients().drop_unsynced();
  memory_->release();
}

void Pass::collect_meetings(const Module& module, const std::string& fqn) {
  auto point = registry::find<registry::MeetingPoint>(module);
  if (point && !meets_at(*point)) {
    point->add(weak_from_this());
    meetings_.push_back({fqn, std::move(point)});
  }
  for (const auto& child : module.named_children()) {
    collect_meetings(*child.value(), fqn.empty() ? child.key() : fqn + "." + child.key());
  }
}

/// Throws if a module with its own collectives was added after the first forward.
void Pass::check_meetings(const Module& root) const {
  if (handles_.empty()) return;
  for (const auto& module : root.modules(/*include_self=*/false)) {
    const auto point = registry::find<registry::MeetingPoint>(*module);
    if (!point || meets_at(*point)) continue;
    const auto named = root.named_modules("", /*include_self=*/false);
    const auto found =
        std::ranges::find(named, module, [](const auto& each) { return each.value(); });
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = found->key()},
                          "embedding tables in a fully sharded model",
                          "the tables that it had at its first forward",
                          "tables that were added later");
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
  // If the last backward threw, the pass is still open.
  if (is_open_ && is_end_queued_ && !is_in_backward()) give_up_backward();
  if (!is_open_) {
    open(at::GradMode::is_enabled() ? PassKind::training : PassKind::inference);
    records_gradients_ = false;
  }
  records_gradients_ = records_gradients_ || at::GradMode::is_enabled();
  if (forward_depth_ == 0) {
    try {
      if (const ModulePtr root = root_.lock()) {
        find_members(*root);
        check_meetings(*root);
      }
      for (const auto& member : members_) member->begin_forward();
      if (!is_in_backward()) begin_phase(PhaseKey::Direction::forward);
    } catch (...) {
      abort();
      throw;
    }
  }
  ++forward_depth_;
}

/// An object that an autograd graph owns, so that its destruction shows that the graph is gone.
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
  const bool is_in_forward =
      runner_->is_in_phase() && runner_->key().direction == PhaseKey::Direction::forward;
  std::exception_ptr write;
  try {
    for (const auto& handle : handles_) handle->check_not_written();
  } catch (const Error&) {
    write = std::current_exception();
  }
  try {
    // A rank that has failed must end the phase too. Otherwise the other ranks would wait until the
    // time-out. The open phase may also be a backward that failed within the forward.
    if ((is_in_forward || has_failed) && runner_->can_end_phase()) end_phase(has_failed || write);
  } catch (...) {
    abort();
    if (!has_failed && !write) throw;
  }
  if (has_failed || write) abort();
  if (write && !has_failed) std::rethrow_exception(write);
  if (has_failed) return;
  has_unwatched_graph_ = has_unwatched_graph_ || !is_watched;
  if (!records_gradients_ || has_had_backward_) close();
}

void Pass::enter_backward() {
  const std::lock_guard lock(mutex_);
  if (!is_open_) {
    open(PassKind::reopened);
    records_gradients_ = true;
  }
  queue_end_of_backward();
}

Pass::Gradients Pass::set_gradients(Gradients gradients) {
  const std::lock_guard lock(mutex_);
  if (const ModulePtr root = root_.lock()) find_members(*root);
  const Gradients before = std::exchange(gradients_, gradients);
  if (before == gradients) return before;
  for (const auto& member : members_) member->set_gradient_sync(gradient_sync());
  return before;
}

/// Throws if a module of a unit was replaced, because the optimizer still has the old parameters,
/// which are not used any more.
void Pass::check_tree() const {
  const ModulePtr root = root_.lock();
  if (!root) return;  // the root is being destroyed
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
          shared_from_this(), streams_, memory_,
          is_tracing_ ? FlatParamHandle::Tracing::on : FlatParamHandle::Tracing::off);
    }
  } catch (...) {
    for (std::size_t i = 0; i < num_entered; ++i) handles_[i]->abort_pass();
    throw;
  }
  // Casts run on the stream `pre_unshard` and read the parameters that the optimizer wrote on the
  // compute stream. So `pre_unshard` waits for the compute stream. All-gathers wait for the casts.
  streams_->make_wait(streams_->pre_unshard, streams_->compute());
  is_open_ = true;
  ++number_;
  num_graphs_ = 0;
  has_unwatched_graph_ = false;
  is_end_queued_ = has_had_backward_ = false;
  adds_to_unsynced_ = std::ranges::any_of(
      handles_, [](const auto& handle) { return handle->gradients().has_unsynced(); });
  last_touched_ = nullptr;
  gathered_.clear();
  collectives_.clear();
  kind_ = kind;
  std::ranges::fill(num_phases_, std::size_t{0});
}

void Pass::close() {
  const UntouchedScope untouched;
  TESSERA_CHECK(!runner_->is_in_phase());
  is_open_ = false;
  is_end_queued_ = false;
  last_touched_ = nullptr;
  gathered_.clear();
  std::exception_ptr first;
  for (const auto& handle : handles_) {
    try {
      handle->leave_pass();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  // A step that accumulates gradients keeps this memory, because the next step probably does too.
  if (gradients_ == Gradients::sync && !adds_to_unsynced_) memory_->release();
  if (first) std::rethrow_exception(first);
}

void Pass::abort() noexcept {
  const std::lock_guard lock(mutex_);
  if (!is_open_) return;
  is_open_ = false;
  is_end_queued_ = false;
  last_touched_ = nullptr;
  gathered_.clear();
  runner_->abort_phase();
  const UntouchedScope untouched;
  for (const auto& handle : handles_) handle->abort_pass();
  memory_->release();
}

// --- events from operators and the backward

void Pass::parameter_touched(FlatParamHandle& handle, std::size_t index) {
  const std::lock_guard lock(mutex_);
  const bool is_backward = is_in_backward();
  if (is_backward) queue_end_of_backward();
  if (is_tracing_ && !is_backward) record_use(index_of(handle), index);
  if (last_touched_ == &handle && handle.gather().is_unsharded()) {
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
  const LastUse use = is_backward ? LastUse::backward : LastUse::forward;
  const auto it = std::ranges::find(gathered_, position, &Gathered::handle);
  if (it == gathered_.end() || it->last_use == LastUse::none) {
    is_before_operator_ = true;
    try {
      gather(position, use);
    } catch (...) {
      is_before_operator_ = false;
      throw;
    }
    is_before_operator_ = false;
  } else if (it->last_use != use) {
    it->last_use = use;
    gather_ahead(position, is_backward);
  }
  handle.gather().finish();
}

void Pass::record_use(std::size_t handle, std::size_t parameter) {
  if (is_visited_[handle][parameter]) return;
  is_visited_[handle][parameter] = true;
  forward_order_.push_back({handle, parameter});
}

// See [Note: Leaving] in pass.h.
void Pass::leave_units_outside(std::size_t handle, bool is_backward) {
  const std::size_t unit = places_[handle].unit;
  for (std::size_t i = gathered_.size(); i-- > 0;) {
    const Gathered& other = gathered_[i];
    const Place& place = places_[other.handle];
    if (place.unit <= unit && unit < place.subtree_end) continue;
    if (other.last_operator == current_operator()) continue;
    if (is_backward ? other.last_use == LastUse::backward
                    : other.last_use == LastUse::forward && gradients_ == Gradients::sync &&
                          handles_[other.handle]->reshards_after_forward()) {
      free(other.handle);
    }
  }
}

/// Returns whether this handle's all-gather is in the list of collectives that all ranks follow.
bool Pass::is_in_order(const FlatParamHandle& handle) const {
  return group_ ? handle.is_sharded() : handle.storage().has_own_full_buffer();
}

bool Pass::is_gathered(std::size_t handle) const {
  return std::ranges::find(gathered_, handle, &Gathered::handle) != gathered_.end();
}

/// Gathers the parameters of a handle that an operator is about to use. First runs the collectives
/// that come before this all-gather in the common order. Afterwards prefetches.
void Pass::gather(std::size_t handle, LastUse last_use) {
  FlatParamHandle& wanted = *handles_[handle];
  if (is_in_order(wanted)) {
    // A use after a forward and before its backward counts as part of a forward.
    if (!runner_->is_in_phase()) begin_phase(PhaseKey::Direction::forward);
    runner_->need(handle);
  } else {
    wanted.gather().prepare();
    wanted.gather().start();
    gathered_.push_back({handle, LastUse::none});
  }
  const auto found = std::ranges::find(gathered_, handle, &Gathered::handle);
  TESSERA_CHECK(found != gathered_.end());
  found->last_use = last_use;
  free_unneeded();
}

/// Prefetches the next unit while `handle`, which was gathered already, computes.
void Pass::gather_ahead(std::size_t handle, bool is_backward) {
  const PrefetchRule& rule = places_[handle].prefetch;
  const bool wants_next = is_backward ? rule.backward == BackwardPrefetch::backward_pre
                                      : rule.forward == ForwardPrefetch::next;
  const bool is_one_ahead =
      std::ranges::find(gathered_, LastUse::none, &Gathered::last_use) != gathered_.end();
  if (wants_next && !is_one_ahead && runner_->is_in_phase()) runner_->gather_next();
}

void Pass::free(std::size_t handle) {
  if (!is_gathered(handle)) return;
  handles_[handle]->gather().reshard();
  if (handles_[handle]->storage().has_own_full_buffer()) rate_limiter_.note_freed();
  std::erase_if(gathered_, [&](const Gathered& each) { return each.handle == handle; });
  if (last_touched_ == handles_[handle].get()) last_touched_ = nullptr;
}

/// Returns whether the operator that is about to run uses parameters of the handle.
bool Pass::is_used_by_operator(std::size_t handle) const {
  const auto it = std::ranges::find(gathered_, handle, &Gathered::handle);
  return is_before_operator_ && it != gathered_.end() && it->last_operator == current_operator();
}

/// Frees units that were prefetched but not needed.
void Pass::free_unneeded() {
  for (std::size_t i = gathered_.size(); i-- > 0;) {
    const Gathered& each = gathered_[i];
    if (each.last_use == LastUse::none && runner_->has_passed(each.position)) free(each.handle);
  }
}

// --- phases

void Pass::begin_phase(PhaseKey::Direction direction) {
  if (runner_->is_in_phase()) {
    if (runner_->key().direction == direction) return;
    end_phase();
  }
  const bool is_backward = direction == PhaseKey::Direction::backward;
  const bool reduces = is_backward && gradients_ == Gradients::sync;
  const auto participates = [&](const auto& handle) {
    return is_in_order(*handle) || (reduces && handle->gradients().are_reduced());
  };
  if (meetings_.empty() && std::ranges::none_of(handles_, participates)) return;
  if (group_) {
    const std::shared_ptr<Pass> other = take_turn(group_.get(), shared_from_this());
    if (other && other.get() != this) other->end_turn();
  }
  std::size_t& num_before = num_phases_[is_backward ? 1 : 0];
  runner_->begin_phase({.direction = direction,
                        .kind = kind_,
                        .keeps_gradients = is_backward && gradients_ == Gradients::keep_unsharded,
                        .number = std::min(num_before, std::size_t{1})});
  ++num_before;
}

/// Ends the open phase, because another root opens one. See [Note: Turns]. Leaves the phase of a
/// forward alone that is running around the other root's.
void Pass::end_turn() {
  const std::lock_guard lock(mutex_);
  if (!runner_->can_end_phase()) return;
  const bool is_backward = runner_->key().direction == PhaseKey::Direction::backward;
  if (!is_backward && forward_depth_ > 0) return;
  // If the backward threw on this rank, the other ranks wait for this rank in the phase.
  if (is_backward && !end_of_backward_.is_queued()) return give_up_backward();
  try {
    end_phase();
  } catch (...) {
    abort();
    throw;
  }
}

void Pass::end_phase(bool has_failed) {
  if (!runner_->is_in_phase()) return;
  const UntouchedScope untouched;
  const bool is_backward = runner_->key().direction == PhaseKey::Direction::backward;
  const std::vector<int> num_gave = runner_->end_phase(has_failed);
  for (std::size_t i = gathered_.size(); i-- > 0;) {
    if (is_backward || gathered_[i].last_use == LastUse::none) free(gathered_[i].handle);
  }
  // A rank that did not use a parameter also gets its shard of the averaged gradient, if another
  // rank used the parameter.
  auto next = num_gave.begin();
  for (const auto& handle : handles_) {
    if (num_gave.empty()) break;
    std::vector<bool> any_gave(handle->unit().parameters.size());
    for (std::size_t i = 0; i < any_gave.size(); ++i) any_gave[i] = *next++ > 0;
    handle->gradients().set_reduced(any_gave);
  }
}

bool Pass::run(const CollectiveSchedule::DueCollective& due) {
  using Role = CollectiveSchedule::DueCollective::Role;
  const std::size_t number = due.what.handle;
  FlatParamHandle& handle = *handles_[number];
  collectives_.push_back(name_of(due.what));
  if (due.what.verb == Collective::Verb::reduce) return reduce(number);
  if (due.role == Role::joined || is_gathered(number)) {
    handle.gather().join();
    return false;
  }
  handle.gather().prepare();
  rate_limiter_.wait_for_room();
  handle.gather().start();
  gathered_.push_back({number, LastUse::none, due.position});
  return true;
}

/// Runs the collectives that come before this meeting in the common order, because other ranks need
/// this rank for them. Then waits until all ranks have reached the module.
bool Pass::meet(const registry::MeetingPoint& point) {
  const std::lock_guard lock(mutex_);
  const bool is_backward = is_in_backward();
  if (!is_open_ || (!is_backward && forward_depth_ == 0)) return false;
  if (is_backward) {
    queue_end_of_backward();
  } else if (!runner_->is_in_phase()) {  // after a backward within the scope
    begin_phase(PhaseKey::Direction::forward);
  }
  const UntouchedScope untouched;
  const auto meeting =
      std::ranges::find(meetings_, &point, [](const Meeting& each) { return each.point.get(); });
  TESSERA_CHECK(meeting != meetings_.end());
  runner_->meet(handles_.size() + static_cast<std::size_t>(meeting - meetings_.begin()));
  return true;
}

std::string Pass::name_of(const Collective& what) const {
  if (what.verb == Collective::Verb::meet) {
    return "run the collectives of " + meetings_[what.handle - handles_.size()].fqn;
  }
  return (what.verb == Collective::Verb::unshard ? "unshard " : "reduce ") +
         handles_[what.handle]->display_name();
}

/// Returns whether the open phase is a backward that reduces gradients.
bool Pass::is_reducing() const {
  return runner_->key().direction == PhaseKey::Direction::backward && gradients_ == Gradients::sync;
}

std::vector<std::size_t> Pass::unreduced() const {
  std::vector<std::size_t> found;
  if (!is_reducing()) return found;
  for (std::size_t i = 0; i < handles_.size(); ++i) {
    if (handles_[i]->gradients().has_any()) found.push_back(i);
  }
  return found;
}

/// Returns for each parameter 1 if this rank has a gradient to average (see `contributed`), else 0.
/// Empty if the phase reduces no gradients.
std::vector<int> Pass::counts() const {
  std::vector<int> gave;
  if (!is_reducing()) return gave;
  for (const auto& handle : handles_) {
    for (const bool each : handle->gradients().contributed()) gave.push_back(each ? 1 : 0);
  }
  return gave;
}

void Pass::gradient_ready(FlatParamHandle& handle, std::size_t index) {
  const std::lock_guard lock(mutex_);
  if (!is_open_) return;
  queue_end_of_backward();
  if (!handle.gradients().are_reduced()) return;
  const UntouchedScope untouched;
  handle.gradients().take(index);
  if (handle.gradients().has_all() && gradients_ == Gradients::sync) {
    runner_->gradients_ready(index_of(handle));
  }
}

/// Starts the reduction of a handle's gradients. Returns whether this rank had any to contribute.
bool Pass::reduce(std::size_t position) {
  FlatParamHandle& handle = *handles_[position];
  const bool is_complete = handle.gradients().has_all();
  const bool gives = handle.gradients().has_any();
  finish_reduces();  // so that at most one whole gradient is in flight
  handle.gradients().start_reduce();
  // If the unit was prefetched for a later use, it stays gathered.
  const auto it = std::ranges::find(gathered_, position, &Gathered::handle);
  const bool is_ahead = it != gathered_.end() && it->last_use == LastUse::none;
  if (is_complete && !is_ahead && !is_used_by_operator(position)) free(position);
  return gives;
}

void Pass::finish_reduces() {
  for (const auto& handle : handles_) handle->gradients().finish_reduce();
}

// Lets the autograd engine call `end_backward` when the backward ends. The engine attaches the call
// to the current backward, which may be a nested one (recomputation). But the first event of a
// backward calls this function, and that event is in the outer backward.
void Pass::queue_end_of_backward() {
  if (is_end_queued_ && end_of_backward_.is_queued()) {
    begin_phase(PhaseKey::Direction::backward);  // again, if another root has ended it
    return;
  }
  if (is_end_queued_) {
    give_up_backward();
    open(PassKind::reopened);
  }
  end_of_backward_.queue([pass = shared_from_this()] { pass->end_backward(); });
  is_end_queued_ = true;
  last_touched_ = nullptr;  // so that the next use in the backward is seen
  for (const auto& member : members_) member->begin_backward();
  begin_phase(PhaseKey::Direction::backward);
}

/// Ends a backward that threw on this rank. The other ranks wait for this rank in the collectives
/// of that backward; they now get an error. All ranks drop that backward's gradients.
void Pass::give_up_backward() {
  try {
    const UntouchedScope untouched;
    // Drops reductions in flight, because the other ranks do not finish them either.
    if (runner_->can_end_phase()) end_phase(/*has_failed=*/true);
  } catch (...) {
    abort();
    throw;
  }
  abort();
}

void Pass::gradient_comes() {
  const std::lock_guard lock(mutex_);
  if (is_open_) queue_end_of_backward();
}

void Pass::end_backward() {
  const std::lock_guard lock(mutex_);
  if (!is_open_) return;
  const UntouchedScope untouched;
  try {
    if (gradients_ == Gradients::keep_unsharded) {
      for (const auto& handle : handles_) handle->gradients().keep_unsynced();
    }
    end_phase();
    finish_reduces();
  } catch (...) {
    abort();
    throw;
  }
  if (forward_depth_ == 0) return close();
  is_end_queued_ = false;  // if the backward ran inside a forward, the pass ends with the forward
  has_had_backward_ = true;
}

}  // namespace tessera::fsdp
