#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <vector>

#include "reshard/plan_report.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Returns whether two pieces of one tensor have the same region (replicas), as in rank files.
bool stores_replicas(const formats::CheckpointContents& contents);
/// Returns the dimensions that pieces of a checkpoint cut. Ignores flat ranges and empty pieces.
std::set<std::size_t> cut_dimensions(const formats::CheckpointContents& contents);

/// Returns the shards that the tensor `name` (a name of the destination) has in the checkpoint
/// PlanOptions::like. Requires: that checkpoint has the tensor, which LayoutCheck checks.
std::vector<Shard> shards_like(const PlanOptions& options, const std::string& name);

/// Returns the name by which the rules of a mesh are chosen for the tensor `name`: `<name>` for
/// `per_rank.<rank>.<name>` that no rule names.
std::string name_for_mesh(const MeshLayout& mesh, const std::string& name);

/// Reports tensors that the rules of PlanOptions::mesh do not fit (by name or dimension), or that
/// PlanOptions::like (the checkpoint whose layout the destination gets) lacks or has in another
/// shape. Does nothing if neither is set. Keeps views of its arguments, which must outlive it.
class LayoutCheck {
 public:
  LayoutCheck(const formats::CheckpointContents& source, const PlanOptions& options,
              PlanReport& report)
      : source_(source), options_(options), report_(report) {}

  /// Returns whether the mesh or the other checkpoint says how to cut a tensor of the source, which
  /// is called `name` at the destination. A tied tensor has several names. If not, reports this at
  /// the first call for this name. Requires: the tensor does not follow another tensor's layout, as
  /// optimizer state follows its parameter's.
  bool has_layout(std::size_t source_tensor, const std::string& name);

  /// Adds a note for each rule of the mesh that `has_layout` never used. Call it last.
  void note_unused_rules();

 private:
  bool fits_mesh(const Shape& shape, const std::string& name);
  bool fits_like(const Shape& shape, const std::string& name);

  const formats::CheckpointContents& source_;
  const PlanOptions& options_;
  PlanReport& report_;
  std::set<std::string> without_layout_;  // names at the destination
  std::set<const MeshLayout::Rule*> used_rules_;
};

}  // namespace tessera::reshard
