#include "tessera/runtime/registry/fused_updates.h"

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

std::vector<FoundFusedUpdates> find_fused_updates(const torch::nn::Module& model) {
  std::vector<FoundFusedUpdates> found;
  collect(model, "", found);
  return found;
}

}  // namespace tessera::registry
