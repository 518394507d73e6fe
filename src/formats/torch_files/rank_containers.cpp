#include "formats/torch_files/rank_containers.h"

#include <algorithm>
#include <cstddef>
#include <span>

namespace tessera::formats::torch_files {

const KeyPath* prefix_of(const KeyPath& path, const std::set<KeyPath>& paths) {
  auto next = paths.upper_bound(path);
  if (next == paths.begin()) return nullptr;
  --next;
  const bool begins =
      next->size() <= path.size() && std::ranges::equal(*next, std::span(path).first(next->size()));
  return begins ? &*next : nullptr;
}

void add_containers(Containers& containers, const KeyPath& path, std::size_t num_joined) {
  KeyPath container(path.begin(),
                    path.begin() + static_cast<std::ptrdiff_t>(std::min(num_joined, path.size())));
  for (std::size_t i = container.size(); i < path.size(); ++i) {
    container.push_back(path[i]);
    std::set<Key>& keys = containers[container];
    if (i + 1 < path.size()) keys.insert(path[i + 1]);
  }
}

std::set<KeyPath> merge_containers(Containers& containers, const Containers& of_rank) {
  std::set<KeyPath> apart;
  for (const auto& [path, keys] : of_rank) {  // each after those that it is in
    if (prefix_of(path, apart) != nullptr) continue;
    const auto [known, is_new] = containers.emplace(path, keys);
    if (!is_new && known->second != keys) apart.insert(path);
  }
  return apart;
}

}  // namespace tessera::formats::torch_files
