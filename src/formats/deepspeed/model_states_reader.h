#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/deepspeed/family.h"

namespace tessera::formats::deepspeed {

/// Whether a member of the model states becomes something other than a value or tensor of its name.
bool is_consumed_member(std::string_view member);
/// Whether DeepSpeed adds the member to what the user saves.
bool is_member_of_deepspeed(std::string_view member);

/// A checkpoint with files of model states: the module, and what the trainer saved beside it.
class ModelStatesReader : public EntryReader {
 protected:
  ModelStatesReader(const FileSystem& fs, std::string path, std::string folder,
                    const std::vector<std::string>& as_dict)
      : EntryReader(fs, std::move(path), std::move(folder), as_dict, family()) {}

  /// Opens the files of model states: one file, or one for each rank.
  void open_model_states(const std::vector<std::string>& names);
  /// Takes opened files, by rank; null for ranks without one, but not for rank 0.
  void set_model_states(std::vector<const File*> models) { models_ = std::move(models); }
  const File& model() const { return *models_.front(); }
  const std::vector<const File*>& models() const { return models_; }

  /// Adds buffers, frozen parameters and ties. `trained`: names of parameters that were added
  /// already, with the numbers of the fp32 weights. `is_rounded` says whether the dtype of the
  /// module's copy is another one. Reports as notes: rounded copies, names without elements, and
  /// buffers that differ between ranks.
  void add_rest_of_module(
      std::set<std::string> trained,
      const std::function<bool(const std::string& name, DType copy)>& is_rounded);
  /// Adds what the user saved beside the model, and what DeepSpeed says of the run, but not the
  /// members `left_out`; what ranks have of their own, too.
  void add_members_of_model_states(const std::set<std::string>& left_out = {});
  /// Adds what the files of optimizer states have beside groups and the state of parameters;
  /// `files` are by rank.
  void add_members_beside_state(const std::vector<const File*>& files, int stage);
  /// Adds each rank's configuration. Where a rank has no file of model states, it is in that of its
  /// optimizer states, which are `optimizer`.
  void add_configurations(const std::vector<const File*>& optimizer);
  /// Adds the members of optimizer states that are no state of parameters; `files` are by rank.
  /// `path`: where they are in a file. `is_used`: whether an entry of a file becomes something
  /// else.
  void add_members_of_optimizer(const std::vector<const File*>& files, const Path& path,
                                const std::function<bool(const Entry&)>& is_used);
  /// Adds an entry of the state of parameter `fqn`. `name`: its path in that state. `add_parts`
  /// adds, at the given path in the checkpoint, a tensor that has an element for each element of
  /// the parameter.
  void add_state_entry(const std::string& fqn, const Path& name, const File& file,
                       const Entry& entry, int rank,
                       const std::function<void(const Path& target)>& add_parts);
  /// Adds the groups of the optimizer at `path`. `names(i)`: the parameters in vector `i`.
  /// DeepSpeed lists vectors where torch lists parameters. `num_groups`: how many of the groups
  /// there are to add; nothing: all.
  void add_param_groups(const File& file, const Path& path,
                        const std::function<std::vector<std::string>(std::int64_t)>& names,
                        std::optional<std::size_t> num_groups = {});

  using EntryReader::note;
  void note(Finding finding) {
    note(std::move(finding.rule), std::move(finding.expected), std::move(finding.found));
  }
  void note_rounded(std::size_t num_rounded);
  void note_without_elements(const std::vector<std::string>& names);
  /// Whether the module's parameters are without elements, as in stage 3.
  bool is_partitioned() const;

 private:
  void add_ties(std::set<std::string>& known);
  std::set<std::string> buffer_names() const;
  void add_frozen_parts(std::set<std::string>& known);
  void add_parts_of_frozen(const std::string& name, Tensor& tensor);
  void note_different_buffers(const std::set<std::string>& buffers);
  bool is_same_tensor(const File& other, const Path& path) const;

  std::vector<const File*> models_;  // by rank, null for those without; one before stage 3
};

}  // namespace tessera::formats::deepspeed
