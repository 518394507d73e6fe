#include "tessera/runtime/registry/fused_updates.h"

#include "tessera/base/error.h"

namespace tessera::registry {
namespace {

void collect(const torch::nn::Module& module, const std::string& prefix,
             std::vector<FoundFusedUpdates>& found) {
  if (const auto* const owner = dynamic_cast<const UpdatesParameters*>(&module)) {
    if (auto updates = owner->fused_updates()) found.push_back({prefix, std::move(updates)});
  }
  for (const auto& child : module.named_children()) {
    collect(*child.value(), prefix + child.key() + ".", found);
  }
}

}  // namespace

void refuse_own_updates(const torch::nn::Module& module, const std::string& fqn,
                        const std::string& api) {
  if (dynamic_cast<const UpdatesParameters*>(&module) == nullptr) return;
  throw Error::expected(ErrorKind::unsupported, {.fqn = fqn}, "module within " + api,
                        "parameters that an optimizer updates, or a sharded collection of tables",
                        module.name() + ", which updates its tables on each rank separately",
                        "apply tessera::shard to it first, even on one rank");
}

std::vector<FoundFusedUpdates> find_fused_updates(const torch::nn::Module& model) {
  std::vector<FoundFusedUpdates> found;
  collect(model, "", found);
  return found;
}

}  // namespace tessera::registry
