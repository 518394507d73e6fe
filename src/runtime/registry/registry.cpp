#include "tessera/runtime/registry/registry.h"

#include <chrono>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::registry {
namespace {

using torch::nn::Module;

struct Entry {
  std::weak_ptr<const Module> module;  // tells whether the module at this address is still the same
  std::map<std::type_index, std::shared_ptr<ModuleState>> states;
};

class Registry {
 public:
  static Registry& instance() {
    static auto* const registry = new Registry;  // outlives every static module
    return *registry;
  }

  std::shared_ptr<ModuleState> find(const Module& module, std::type_index type) {
    const std::lock_guard lock(mutex_);
    const auto it = entries_.find(&module);
    if (it == entries_.end() || it->second.module.expired()) return nullptr;
    const auto state = it->second.states.find(type);
    return state == it->second.states.end() ? nullptr : state->second;
  }

  void attach(Module& module, std::type_index type, std::shared_ptr<ModuleState> state) {
    const std::weak_ptr<Module> weak = weak_module(module);
    auto dead = take_dead_if_due();  // destroyed when the lock is released
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_[&module];
    if (entry.module.expired()) {  // of a destroyed module at this address
      dead.push_back(std::exchange(entry, Entry{}));
    }
    entry.module = weak;
    entry.states[type] = std::move(state);
  }

  std::size_t num_modules() {
    const auto dead = take_dead();
    const std::lock_guard lock(mutex_);
    return entries_.size();
  }

 private:
  using Clock = std::chrono::steady_clock;

  /// As take_dead, but does nothing if that would take more than a tenth of the time: calls for
  /// each module of a large model would otherwise look at all others each time.
  std::vector<Entry> take_dead_if_due() {
    const Clock::time_point begin = Clock::now();
    {
      const std::lock_guard lock(mutex_);
      if (begin < next_look_) return {};
    }
    auto dead = take_dead();
    const Clock::time_point end = Clock::now();
    const std::lock_guard lock(mutex_);
    next_look_ = end + 9 * (end - begin);
    return dead;
  }

  /// Removes the entries of destroyed modules and returns them. The caller destroys them without
  /// the lock, because their destructors may use the registry.
  std::vector<Entry> take_dead() {
    std::vector<Entry> dead;
    const std::lock_guard lock(mutex_);
    for (auto it = entries_.begin(); it != entries_.end();) {
      if (it->second.module.expired()) {
        dead.push_back(std::move(it->second));
        it = entries_.erase(it);
      } else {
        ++it;
      }
    }
    return dead;
  }

  std::mutex mutex_;
  std::unordered_map<const Module*, Entry> entries_;
  Clock::time_point next_look_{};  // of take_dead_if_due
};

}  // namespace

std::weak_ptr<Module> weak_module(Module& module) {
  std::weak_ptr<Module> weak = module.weak_from_this();
  if (weak.expired()) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "module " + module.name(),
                          "a module that a shared_ptr owns (std::make_shared or a ModuleHolder)",
                          "a module on the stack or inside another object");
  }
  return weak;
}

namespace {

struct AppliedApi final : ModuleState {
  AppliedApi(std::string its_name, dist::Mesh its_mesh)
      : name(std::move(its_name)), mesh(std::move(its_mesh)) {}
  std::string name;
  dist::Mesh mesh;
};

}  // namespace

void note_applied(Module& module, std::string api, dist::Mesh mesh) {
  attach(module, std::make_shared<AppliedApi>(std::move(api), std::move(mesh)));
}

std::optional<std::string> applied_api(const Module& module) {
  const auto applied = find<AppliedApi>(module);
  return applied ? std::optional(applied->name) : std::nullopt;
}

std::optional<dist::Mesh> applied_mesh(const Module& module) {
  const auto applied = find<AppliedApi>(module);
  return applied ? std::optional(applied->mesh) : std::nullopt;
}

namespace detail {

std::shared_ptr<ModuleState> find(const Module& module, std::type_index type) {
  return Registry::instance().find(module, type);
}

void attach(Module& module, std::type_index type, std::shared_ptr<ModuleState> state) {
  Registry::instance().attach(module, type, std::move(state));
}

}  // namespace detail

std::size_t num_modules() {
  return Registry::instance().num_modules();
}

}  // namespace tessera::registry
