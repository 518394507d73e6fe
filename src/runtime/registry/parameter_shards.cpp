#include "runtime/registry/parameter_shards.h"

#include <mutex>
#include <unordered_map>

#include "runtime/weak_tensor.h"

namespace tessera::registry {
namespace {

class Shards {
 public:
  static Shards& of_process() {
    static Shards shards;
    return shards;
  }

  /// Stores `shard` for a parameter. If the map has doubled since the last clean-up, also removes
  /// the entries of destroyed parameters.
  void note(const at::Tensor& parameter, ParameterShard shard) {
    const std::lock_guard lock(mutex_);
    if (shards_.size() >= prune_at_) {
      std::erase_if(shards_,
                    [](const auto& each) { return !each.second.parameter.lock().defined(); });
      prune_at_ = 2 * shards_.size() + 1;
    }
    shards_.insert_or_assign(parameter.unsafeGetTensorImpl(),
                             Entry{WeakTensor(parameter), std::move(shard)});
  }

  std::optional<ParameterShard> find(const at::Tensor& parameter) {
    const std::lock_guard lock(mutex_);
    const auto it = shards_.find(parameter.unsafeGetTensorImpl());
    if (it == shards_.end() || !it->second.parameter.lock().defined()) return std::nullopt;
    return it->second.shard;
  }

 private:
  struct Entry {
    WeakTensor parameter;
    ParameterShard shard;
  };
  std::mutex mutex_;
  // The WeakTensor in an entry keeps the key's address from being used for a new tensor.
  std::unordered_map<const at::TensorImpl*, Entry> shards_;
  std::size_t prune_at_ = 0;
};

}  // namespace

void note_shard(const at::Tensor& parameter, ParameterShard shard) {
  Shards::of_process().note(parameter, std::move(shard));
}

std::optional<ParameterShard> find_shard(const at::Tensor& parameter) {
  return Shards::of_process().find(parameter);
}

}  // namespace tessera::registry
