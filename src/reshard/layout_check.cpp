#include "reshard/layout_check.h"

#include <algorithm>
#include <map>
#include <utility>

#include "formats/per_rank.h"
#include "tessera/base/error.h"
#include "tessera/base/name_rules.h"

namespace tessera::reshard {

using formats::CheckpointContents;
using formats::Piece;
using formats::TensorEntry;

namespace {

/// Returns the tensor with this name, or the tensor whose alias has this name; nullptr if there is
/// neither. For an entry of one rank that is not there, returns the entry that ranks share.
const TensorEntry* find_named(const CheckpointContents& checkpoint, const std::string& name) {
  const TensorEntry* found = checkpoint.find_tensor(name);
  if (found != nullptr) return found;
  const auto alias = std::ranges::find(checkpoint.aliases, name, &formats::Alias::fqn);
  if (alias != checkpoint.aliases.end()) return checkpoint.find_tensor(alias->target);
  const std::string shared(formats::name_without_rank(name));
  return shared == name ? nullptr : find_named(checkpoint, shared);
}

}  // namespace

bool stores_replicas(const CheckpointContents& contents) {
  return std::ranges::any_of(contents.tensors, [](const TensorEntry& tensor) {
    std::set<Region> regions;
    return std::ranges::any_of(
        tensor.pieces, [&](const Piece& piece) { return !regions.insert(piece.region).second; });
  });
}

std::set<std::size_t> cut_dimensions(const CheckpointContents& contents) {
  std::set<std::size_t> dimensions;
  for (const TensorEntry& tensor : contents.tensors) {
    for (const Piece& piece : tensor.pieces) {
      const auto* const box = std::get_if<Box>(&piece.region);
      if (box == nullptr || box->numel() == 0) continue;
      for (std::size_t dim = 0; dim < box->sizes.size(); ++dim) {
        if (box->sizes[dim] != tensor.meta.shape[dim]) dimensions.insert(dim);
      }
    }
  }
  return dimensions;
}

std::string name_for_mesh(const MeshLayout& mesh, const std::string& name, const Shape& shape) {
  const std::string_view shared = formats::name_without_rank(name);
  if (shared.size() == name.size() || mesh.choose_rule(name, shape).rule != nullptr) return name;
  return std::string(shared);
}

std::vector<Shard> shards_like(const PlanOptions& options, const std::string& name) {
  const TensorEntry* other = find_named(*options.like, name);
  TESSERA_CHECK(other != nullptr);
  std::map<Region, std::vector<int>> ranks_of;
  for (const Piece& piece : other->pieces) {
    if (numel_of(piece.region) != 0) ranks_of[piece.region].push_back(piece.rank);
  }
  std::vector<Shard> shards;
  for (auto& [region, ranks] : ranks_of) {
    std::ranges::sort(ranks);
    shards.push_back({region, std::move(ranks)});
  }
  if (shards.empty()) shards.push_back({whole_box(other->meta.shape), {0}});
  return shards;
}

bool LayoutCheck::has_layout(std::size_t source_tensor, const std::string& name) {
  if (!options_.mesh && !options_.like) return true;
  if (without_layout_.contains(name)) return false;
  const Shape& shape = source_.tensors[source_tensor].meta.shape;
  return options_.mesh ? fits_mesh(shape, name) : fits_like(shape, name);
}

bool LayoutCheck::fits_mesh(const Shape& shape, const std::string& name) {
  auto [rule, expected, found] =
      options_.mesh->choose_rule(name_for_mesh(*options_.mesh, name, shape), shape);
  if (rule != nullptr) used_rules_.insert(rule);
  if (expected.empty()) return true;
  without_layout_.insert(name);
  report_.problem_at({.path = options_.mesh->path, .fqn = name}, "rules of the mesh",
                     std::move(expected), std::move(found));
  return false;
}

bool LayoutCheck::fits_like(const Shape& shape, const std::string& name) {
  const TensorEntry* other = find_named(*options_.like, name);
  if (other != nullptr && other->meta.shape == shape) return true;
  without_layout_.insert(name);
  report_.problem_at(
      {.path = options_.like_path, .fqn = name}, "pieces of another checkpoint",
      other == nullptr ? "a tensor of this name" : "the shape " + shape_to_string(shape),
      other == nullptr ? "none" : shape_to_string(other->meta.shape));
  return false;
}

void LayoutCheck::note_unused_rules() {
  if (!options_.mesh) return;
  for (const MeshLayout::Rule& rule : options_.mesh->rules) {
    if (used_rules_.contains(&rule)) continue;
    report_.note_at({.path = options_.mesh->path}, "rule for '" + printable(rule.names) + "'",
                    "a moved tensor whose first matching rule is this one", "none");
  }
}

}  // namespace tessera::reshard
