#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "formats/deepspeed/family.h"
#include "formats/deepspeed/partition.h"
#include "formats/torch_files/copies.h"

namespace tessera::formats::deepspeed {

/// Returns whether the reader turns this member (an outermost key of a file of model states) into
/// something else, such as `module` into tensors. It then shows no value with the member's name.
bool is_consumed_member(std::string_view member);
/// Returns whether DeepSpeed writes this member by itself, beside what the user saves.
bool is_member_of_deepspeed(std::string_view member);

/// The base class of readers of checkpoints with files of model states (`*_model_states.pt`). Such
/// a file holds the module, and what the trainer saved beside it.
class ModelStatesReader : public EntryReader {
 protected:
  ModelStatesReader(const FileSystem& fs, std::string path, std::string folder,
                    const std::vector<std::string>& as_dict)
      : EntryReader(fs, std::move(path), std::move(folder), as_dict, family()) {}

  /// Opens the files of model states: one file, or one for each rank.
  void open_model_states(const std::vector<std::string>& names);
  /// Takes opened files, by rank. A rank without a file has null; rank 0 must have a file.
  void set_model_states(std::vector<const File*> models);
  const File& model() const { return *models_.front(); }
  const std::vector<const File*>& models() const { return models_; }

  /// Throws Error(corruption) if the member `module` is not a dict. If `may_be_none`, it may also
  /// be None.
  void require_module(bool may_be_none) const;
  /// Adds buffers, frozen parameters and ties. `trained`: by name, the shapes of the parameters
  /// that the reader has added before, from the fp32 weights. `is_rounded` returns whether the
  /// module's copy of a parameter, of dtype `copy`, has another dtype than these weights. Makes
  /// notes of: rounded copies, names without elements, and buffers that differ between ranks.
  /// Throws: Error(corruption) if a copy has another shape.
  void add_rest_of_module(
      std::map<std::string, Shape> trained,
      const std::function<bool(const std::string& name, DType copy)>& is_rounded);
  /// Adds the members of the model states, except tensors of the module: what DeepSpeed records of
  /// the run, and other entries of the module (`_extra_state`). `finish` adds what the user saved.
  /// Both functions leave out the members `left_out`, and add members that only some ranks have.
  void add_members_of_model_states(std::set<std::string> left_out = {});
  /// Says that Tessera wrote the checkpoint. A member `per_rank` is then not the user's.
  void set_written_by_tessera() { is_written_by_tessera_ = true; }
  /// Adds what the user saved, and calls EntryReader::finish.
  void finish();
  /// Adds members of the optimizer's files, but not weights, parameter groups, state, `ds_config`,
  /// `ds_version` and what describes ZeRO's cuts. `files`: one for each rank. `stage`: of ZeRO.
  void add_members_beside_state(const std::vector<const File*>& files, int stage);
  /// Adds each rank's `ds_config`. If a rank has no file of model states, its configuration is read
  /// from its file of optimizer states, `optimizer[rank]`.
  void add_configurations(const std::vector<const File*>& optimizer);
  /// Adds the entries below `path` in `files` (optimizer states, one file for each rank) under
  /// `deepspeed.optimizer_state_dict`. Leaves out those that say how ZeRO cut the vectors, and
  /// those for which `is_used` returns true (they become, for example, a parameter's state).
  void add_members_of_optimizer(const std::vector<const File*>& files, const Path& path,
                                const std::function<bool(const Entry&)>& is_used);
  /// Adds an entry of the state of parameter `fqn`. `name`: its path in that state. If the entry is
  /// a tensor with dimensions, calls `add_parts` to add it at the path `target` of the checkpoint,
  /// with one element for each element of the parameter.
  void add_state_entry(const std::string& fqn, const Path& name, const File& file,
                       const Entry& entry, int rank,
                       const std::function<void(const Path& target)>& add_parts);
  /// Does what `form_of_state` does. Remembers the forms, so that all parameters of a vector need
  /// one look at the ranks' files.
  std::variant<VectorForm, Error> state_form(const Partition& partition,
                                             const std::vector<const File*>& optimizer,
                                             const Slice& slice, const Path& name,
                                             const std::string& fqn);
  using NamesInVector = std::function<std::optional<std::vector<std::string>>(std::int64_t)>;
  /// Adds the parameter groups that are at `path` in the file. A group of DeepSpeed lists the
  /// numbers of flat vectors where a group of torch lists parameters; `names(i)` returns the
  /// parameters in vector `i`, or nothing if the group is to have no `params`. Adds the first
  /// `num_groups` groups, or all without a number. Makes a note if there are no groups, unless a
  /// number is given.
  void add_param_groups(const File& file, const Path& path, const NamesInVector& names,
                        std::optional<std::size_t> num_groups = {});

  /// Says that the module has `name` at this place in the order of keys. Of several places, the
  /// first that is added counts.
  void add_place_in_module(const std::string& name, std::uint32_t order) {
    places_in_module_.emplace(name, order);
  }
  /// Returns a parameter's name, then the names that are tied to it (in `shared_params`) but have a
  /// tensor of their own in the module.
  std::vector<std::string> names_in_module(const std::string& parameter) const;
  /// Compares the modules in the files of each list in `of_ranks`: in stage 3 each data rank saves
  /// its own. Makes a note of buffers that differ (those of a list's first file are read), and a
  /// note of copies of parameters that differ (not read: other members have the parameters).
  void note_different_buffers(const std::vector<std::vector<const File*>>& of_ranks,
                              const std::function<bool(const std::string& name)>& is_parameter);
  void note_rounded(std::size_t num_rounded);
  /// Returns which of two copies of a weight is read. ZenFlow updates the module's copy of selected
  /// columns in each step, but the fp32 weights only every few steps. `place`: of these copies.
  static std::string advice_about_copies(const File& model, const std::string& place);
  /// Notes the names in `shared_params` of `files` under which the reader reads nothing. `is_read`:
  /// whether a parameter or a tie has the name. Tensors in `module` with elements are always read.
  void note_ties_without_tensor(const std::vector<const File*>& files,
                                const std::function<bool(const std::string&)>& is_read);
  /// Returns the ranks' parts of a frozen parameter of stage 3, one for each rank that has elements
  /// of it. Throws Error(corruption) if a rank has no part, or one of another size or dtype.
  std::vector<Run> runs_of_frozen(const std::string& name, std::int64_t numel) const;
  void note_without_elements(const std::vector<std::string>& names);
  /// Whether the file has a frozen parameter of stage 3 as int8 codes
  /// (zero_quantized_nontrainable_weights). DeepSpeed saves the codes' scales in no file.
  static bool is_quantized_frozen(const File& file, const std::string& name);
  /// Adds such a parameter as one that cannot be read.
  void add_quantized_frozen(const File& file, const std::string& name);
  /// Returns whether the file's name is of ZeRO stage 3. Parameters in it then have no elements.
  bool is_partitioned() const { return is_partitioned(model()); }
  static bool is_partitioned(const File& model);
  /// Adds `optim.state` as an empty dict if the optimizer has groups at `path` in the file, but no
  /// state was added, as for SGD without momentum. PyTorch's optimizers look for this key.
  void add_state_without_items(const File& file, const Path& path);

 private:
  /// Returns the entry's place in the order of keys: below `optim` the next place; else `order`. If
  /// `order` is 0 (a joined tensor): the place of its name in the module; the next place if none.
  std::uint32_t place_of(const KeyPath& path, std::uint32_t order) final;
  static Place below(KeyPath path, const Entry& entry, std::size_t begin);
  void add_ties(std::map<std::string, Shape>& known);
  void note_frozen_fragments();
  bool is_of_user(const std::string& member) const;
  /// Returns the user's members that clash with other entries ([Note: Members that clash]).
  std::set<std::string> clashing_members() const;
  /// Returns the outermost key below which the members `clashing` are added: `client_state`. If the
  /// user has a value there, or a dict with one of these members: `client_state2`, and so on.
  std::string key_for(const std::set<std::string>& clashing) const;
  void add_client_state();
  std::set<std::string> buffer_names() const;
  void add_frozen_parts(std::map<std::string, Shape>& known);
  void add_frozen(const std::string& name, const Shape& shape, DType dtype,
                  const std::vector<Run>& runs);

  std::vector<const File*> models_;  // by rank, null if it has no file; before stage 3 only one
  bool has_state_ = false;           // whether state of a parameter was added
  std::map<std::string, std::uint32_t> places_in_module_;  // in the order of keys, by name
  std::set<std::string> left_out_;                         // members of the model states
  std::map<std::tuple<const Partition*, std::string, Path>, VectorForm> forms_;  // by vector, state
  bool is_written_by_tessera_ = false;
};

}  // namespace tessera::formats::deepspeed
