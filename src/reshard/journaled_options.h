#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/formats/create.h"
#include "tessera/formats/merge.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// The options that a plan depends on, as the user gave them. The journal records them. If a run
/// that resumes has other options, its error names the option that has changed.
struct JournaledOptions {
  int world_size = 0;                          // 0: not given
  std::string strategy{};                      // empty: not given
  std::string table_plan{};                    // the content of the file; empty: not given
  std::string mesh{};                          // the content of the file; empty: not given
  std::string like{};                          // layout_digest of the checkpoint; empty: not given
  std::string units{};                         // the content of the file; empty: not given
  std::string flat_layout{};                   // the content of the file; empty: not given
  std::vector<std::string> as_dict{};          // classes
  std::string optimizer_params{};              // `auto`, or the content of the file
  std::string recipe{};                        // the content of the file; empty: not given
  bool inverse = false;                        // the recipe is applied backwards
  std::vector<std::string> set{};              // values of the recipe's variables
  std::vector<std::string> only{};             // globs
  std::vector<Rename> renames{};               // in the order given
  std::vector<Rename> prefix_removals{};       // only of a split: the prefixes that names lose
  std::vector<std::string> source_prefixes{};  // only of a merge: one per source, may be empty
  formats::MergePreference preference = formats::MergePreference::none;  // of a merge
  std::optional<DType> cast{};                                           // empty: not given
  OnOverflow on_overflow = OnOverflow::refuse;                           // of the cast
  OptimizerNames optimizer_names = OptimizerNames::as_stored;  // for fused optimizers of tables
  bool drop_optimizer = false;                                 // leave out optimizer state
  bool allow_missing = false;  // leave out incomplete and missing entries
  bool allow_lossy = false;    // merge state that is stored per column shard
  bool as_is = false;          // accept a source that is only a part of a checkpoint
};

/// Returns a digest of a checkpoint's world size and of its tensors' names, shapes and pieces.
std::string layout_digest(const formats::CheckpointContents& contents);

/// Returns the options as members of a journal's ResumeIdentity. A file is represented by the
/// digest of its content.
formats::ResumeIdentity identity_of_options(const JournaledOptions& given);

}  // namespace tessera::reshard
